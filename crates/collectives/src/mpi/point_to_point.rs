//! Send and receive.
//!
//! The sender sends its signature, with the data if it is small. The receiver compares it with its own; data that is not
//! small is sent only once the receiver has said `READY`: so a receiver that expects something else is an error on both
//! sides, and no memory is lent to a message that nobody will take.

use super::group::{CALL, Group, Passage, announced, data_in, longest_call, signature_in, written};
use super::library::Requests;
use super::waiting::Pause;
use crate::collective::{Kind, Signature};
use crate::private::Private;
use crate::{ElementType, Elements, ElementsMut, Error, Result};
use std::time::Duration;

const MESSAGE: i32 = 3;
const READY: i32 = 4;
const MESSAGE_DATA: i32 = 5;

/// How long a peer may be seen in a collective before its message counts as never sent.
const OVERTAKEN: Duration = Duration::from_millis(10);

/// One direction of a message.
#[derive(Debug, Clone, Copy)]
struct Transfer {
    peer: usize,
    memory: Private,
    element: ElementType,
}

impl Transfer {
    fn is_small(&self, group: &Group) -> bool {
        self.memory.len() <= group.small
    }

    /// What both sides must agree on.
    fn signature(&self) -> Signature {
        Signature {
            element: Some(self.element),
            ..Signature::of_kind(Kind::Send, (self.memory.len() / self.element.size()) as u64)
        }
    }
}

/// The messages about data, which go through the group's own memory.
#[derive(Debug, Default)]
struct Control {
    announcement: Requests,
    signature: Requests,
    ready_to_come: Requests,
    ready_to_go: Requests,
}

impl Passage<'_> {
    pub(super) fn exchange_messages(
        &mut self,
        send: Option<(Elements<'_>, usize)>,
        receive: Option<(ElementsMut<'_>, usize)>,
    ) -> Result<()> {
        let send = send.map(|(values, peer)| Transfer {
            peer,
            memory: Private::of(values.bytes()),
            element: values.element(),
        });
        let receive = receive.map(|(mut values, peer)| Transfer {
            peer,
            element: values.element(),
            memory: Private::of_mut(values.bytes_mut()),
        });
        let (mut control, mut data) = (Control::default(), Requests::default());
        let result = self.move_messages(&mut control, &mut data, send, receive);
        if let Err(error) = &result {
            for requests in [
                control.announcement,
                control.signature,
                control.ready_to_come,
                control.ready_to_go,
            ] {
                self.give_up(requests);
            }
            // What has been agreed on comes to its end; the error is about the other direction.
            let all = data.len();
            if matches!(error, Error::Mpi { .. }) {
                self.settle(&mut data, error);
            } else {
                self.wait_for_data(&mut data, all)?;
            }
        }
        result
    }

    fn move_messages(
        &mut self,
        control: &mut Control,
        data: &mut Requests,
        send: Option<Transfer>,
        receive: Option<Transfer>,
    ) -> Result<()> {
        let (library, channel, size) = (self.group.library, self.group.channel, self.group.size);
        let (inbox, outbox) = (self.engine.inbox.lend(), self.engine.outbox.lend());
        let (ready_in, ready_out) = (inbox.slot(size).part(0..1), outbox.slot(size).part(0..1));
        let mut to_come = receive;
        let mut to_go = send.filter(|send| !send.is_small(self.group));
        if let Some(receive) = &receive {
            let memory = inbox.slot(receive.peer);
            control
                .announcement
                .receive(library, channel, memory, receive.peer, MESSAGE)?;
        }
        if let Some(send) = &send {
            let small = send.memory.part(
                0..if send.is_small(self.group) {
                    send.memory.len()
                } else {
                    0
                },
            );
            let message = written(&outbox.slot(send.peer), &send.signature(), &small);
            control.signature.send(library, channel, message, send.peer, MESSAGE)?;
        }
        if let Some(send) = &to_go {
            control
                .ready_to_come
                .receive(library, channel, ready_in, send.peer, READY)?;
        }

        let mut pause = Pause::new(self.patience, true);
        let mut overtaken = None;
        loop {
            if let Some(receive) = to_come
                && control.announcement.have_ended(library, control.announcement.len())?
            {
                self.compare_message(&receive, &inbox.slot(receive.peer))?;
                if receive.is_small(self.group) {
                    let came = data_in(&inbox.slot(receive.peer), receive.memory.len());
                    receive.memory.copy_between(&came);
                } else {
                    data.receive(library, channel, receive.memory, receive.peer, MESSAGE_DATA)?;
                    control
                        .ready_to_go
                        .send(library, channel, ready_out, receive.peer, READY)?;
                }
                to_come = None;
            }
            if let Some(send) = to_go
                && control.ready_to_come.have_ended(library, control.ready_to_come.len())?
            {
                data.send(library, channel, send.memory, send.peer, MESSAGE_DATA)?;
                to_go = None;
            }
            let own = [&mut control.signature, &mut control.ready_to_go];
            let mut own_have_gone = true;
            for requests in own {
                own_have_gone &= requests.have_ended(library, requests.len())?;
            }
            if to_come.is_none() && to_go.is_none() && own_have_gone {
                return self.wait_for_data(data, data.len());
            }
            // Data that is on its way needs the tests.
            pause.may_sleep = data.have_ended(library, data.len())?;
            let Some(waited) = pause.pause() else { continue };
            let awaited = [to_come, to_go].into_iter().flatten().map(|transfer| transfer.peer);
            let awaited: Vec<usize> = awaited.collect();
            self.look_after(&awaited, waited, &mut overtaken)?;
        }
    }

    /// Looks whether waiting for `peers` still makes sense.
    fn look_after(&self, peers: &[usize], waited: Duration, overtaken: &mut Option<Duration>) -> Result<()> {
        let (group, library) = (self.group, self.group.library);
        group.read_notices()?;
        if let Some(error) = group.failure() {
            return Err(error);
        }
        if waited > self.timeout {
            return Err(self.late(waited, peers.to_vec()));
        }
        for peer in peers {
            self.is_there(*peer)?;
            if !library.has_come(group.channel, *peer, CALL)? {
                continue;
            }
            // The peer waits in a collective for this very rank; what it sent before has come before.
            if waited < *overtaken.get_or_insert(waited + OVERTAKEN) {
                continue;
            }
            let mut call = vec![0; longest_call(group)];
            library.take(group.channel, Some(*peer), CALL, &mut call)?;
            let (word, count) = signature_in(&Private::of(&call));
            let calls = [
                (group.rank, self.signature.to_string()),
                (*peer, announced(word, count)),
            ];
            return Err(self.mismatch(self.sequence(), calls.into_iter()));
        }
        Ok(())
    }

    fn compare_message(&self, receive: &Transfer, message: &Private) -> Result<()> {
        let expected = receive.signature();
        let (word, count) = signature_in(message);
        if (word, count) == (expected.pack(), expected.count) {
            return Ok(());
        }
        let receives = format!("receive of {} {}", expected.count, receive.element.name());
        let calls = [(receive.peer, announced(word, count)), (self.group.rank, receives)];
        Err(self.mismatch(self.sequence(), calls.into_iter()))
    }
}
