//! A run over several machines: a launcher on each, which agree on rounds through a store that machine 0's launcher hosts.
//!
//! The launcher of machine 0 is two things: a member as all others, and the *coordinator*, a thread that alone decides
//! ([`coordinator`], driven by [`host`]). Nobody speaks with anybody directly: there are two journals in the store
//! ([`journal`]), whose entries are never changed. That makes one order of all that happens, and with it one first cause.
//!
//! | key | who may write | what |
//! | --- | --- | --- |
//! | `sconce/launch/report/N` | any member, by compare-and-set of the first N that is free | a [`Report`](messages::Report): hello, failed, ended, leaving, gone |
//! | `sconce/launch/order/N` | the coordinator | an [`Order`](messages::Order): start a round, stop it, leave, end |
//! | `sconce/launch/beat/ID` | the member ID, every `--monitor_interval` | a number that grows |
//!
//! States of the coordinator:
//!
//! | state | entered when | left when |
//! | --- | --- | --- |
//! | gathering | at the start; a round is over and another shall be | all machines are there, or at least MIN for `last_call_timeout`: *start* is ordered, running. Not so within `timeout`: *end*, over |
//! | running | *start* was ordered | all members' ranks ended well: *end*, over. One failed, a member was lost (silent for `keep_alive_timeout`), leaves, or came: *stop* is ordered, stopping |
//! | stopping | *stop* was ordered | every member of the round has said *ended*, or is lost: gathering where restarts are left or only members changed; else *end*, over |
//! | over | *end* was ordered | every member has said *gone* or is lost, or some seconds have passed: the store goes |
//!
//! The first reason is the cause, with one exception: a member whose last beat came before the first failure was dead
//! already when ranks elsewhere failed for want of it, and its loss is the cause.
//!
//! States of a member ([`member`]):
//!
//! | state | entered when | left when |
//! | --- | --- | --- |
//! | waiting | it has said *hello*; a round is over here | *start* with its ID: in a round. *leave* or *end*: gone. The store is lost: gone, with an error |
//! | in a round | *start* | all its ranks have ended, by themselves or stopped as [`supervise`](super::supervise) says (*stop*, *end*, a signal, or the store's loss): it says *ended*, waiting |
//! | gone | | it has said so, and its process ends |
//!
//! The ranks of each round have a store of their own, on machine 0, with a secret of their own: nothing of one round is
//! found in the next. When machine 0's launcher dies, connections to the store break: the other members stop their ranks
//! and end. A member that the network cuts off notices by its beats, within `keep_alive_timeout`.

mod coordinator;
mod host;
mod journal;
mod link;
mod meeting;
mod member;
mod messages;

use std::process::ExitCode;

use super::round::Job;
use super::surroundings::Machines;
use crate::command_error::CommandError;
use meeting::Meeting;
use member::Member;

/// Runs `job` together with the launchers of the other machines.
///
/// # Errors
/// When the launchers do not meet, this one is refused, or the store is lost. What stops a run is told on stderr.
pub(super) fn run(job: &Job<'_>, machines: &Machines) -> Result<ExitCode, CommandError> {
    let meeting = Meeting::open(job, machines)?;
    let code = Member::join(job, machines, &meeting)?.run();
    // Others may still read the last order.
    meeting.close();
    code
}
