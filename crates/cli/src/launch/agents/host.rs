//! The coordinator at work: a thread of machine 0's launcher that reads reports, writes orders, and hosts the ranks' store.

use std::net::{IpAddr, TcpListener};
use std::time::{Duration, Instant};

use sconce_collectives::Result;
use sconce_collectives::store::{Secret, StoreClient, StoreServer};

use super::coordinator::{Act, Coordinator, Rules};
use super::journal::{Journal, ORDERS, REPORTS, beat_key};
use super::messages::{Farewell, Order, Report, Start};
use crate::terminal::tell;

/// After how long it is said that machines are waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the coordinator needs beside what it decides.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) client: StoreClient,
    /// Where the launchers' store listens, and with it those of the ranks.
    pub(super) listens_at: IpAddr,
    pub(super) main_port: u16,
    pub(super) secret: String,
    pub(super) run_id: String,
    pub(super) interval: Duration,
    pub(super) rules: Rules,
}

impl Host {
    /// Decides until the run is over and everybody knows.
    pub(super) fn run(self) {
        let mut desk = Desk {
            coordinator: Coordinator::new(self.rules.clone(), Instant::now()),
            reports: Journal::new(REPORTS),
            orders: Journal::new(ORDERS),
            beats: Vec::new(),
            ranks_store: None,
            host: self,
        };
        if let Err(error) = desk.work() {
            // The store is this process's own: only memory or descriptors can have run out. The members notice by their own
            // calls.
            tell(&format!("error: the coordinator of the run has failed: {error}\n"));
        }
    }
}

#[derive(Debug)]
struct Desk {
    host: Host,
    coordinator: Coordinator,
    reports: Journal,
    orders: Journal,
    /// The last beat of each member.
    beats: Vec<(String, Vec<u8>)>,
    /// The ranks' store of this round.
    ranks_store: Option<StoreServer>,
}

impl Desk {
    fn work(&mut self) -> Result<()> {
        let started = Instant::now();
        let mut is_waiting_told = false;
        let mut looked = started;
        while !self.coordinator.is_done(Instant::now()) {
            if let Some(report) = self.reports.read::<Report>(&self.host.client, self.host.interval)? {
                let acts = self.coordinator.on_report(report, Instant::now());
                self.carry_out(acts)?;
            }
            if looked.elapsed() >= self.host.interval {
                self.look_for_beats()?;
                looked = Instant::now();
                let acts = self.coordinator.on_time(looked);
                self.carry_out(acts)?;
            }
            let is_late = !self.coordinator.is_in_round() && started.elapsed() >= PATIENCE;
            if is_late && !is_waiting_told && self.ranks_store.is_none() {
                is_waiting_told = true;
                let (here, count) = (self.coordinator.ids().count(), self.host.rules.count);
                tell(&format!(
                    "notice: {here} of {count} machines are here; waiting for the others\n"
                ));
            }
        }
        Ok(())
    }

    fn look_for_beats(&mut self) -> Result<()> {
        let ids = Vec::from_iter(self.coordinator.ids().map(str::to_owned));
        self.beats.retain(|(id, _)| ids.contains(id));
        for id in ids {
            let Some(beat) = self.host.client.get(&beat_key(&id))? else {
                continue;
            };
            match self.beats.iter_mut().find(|(of, _)| *of == id) {
                Some((_, last)) if *last == beat => continue,
                Some((_, last)) => *last = beat,
                None => self.beats.push((id.clone(), beat)),
            }
            self.coordinator.on_beat(&id, Instant::now());
        }
        Ok(())
    }

    fn carry_out(&mut self, acts: Vec<Act>) -> Result<()> {
        for act in acts {
            let order = match act {
                Act::Tell(text) => {
                    tell(&text);
                    continue;
                }
                Act::Announce(text) => Order::Announce { text },
                Act::Stop { round } => Order::Stop { round },
                Act::Leave { id, farewell } => Order::Leave { id, farewell },
                Act::End(farewell) => Order::End(farewell),
                Act::Start {
                    round,
                    restarts,
                    members,
                } => match self.open_round(round) {
                    Ok((main_port, store_port)) => Order::Start(Start {
                        run_id: self.host.run_id.clone(),
                        round,
                        restarts,
                        members,
                        main_port,
                        store_port,
                    }),
                    Err(reason) => Order::End(Farewell {
                        text: format!("error: machine 0 cannot host the ranks' store: {reason}\n"),
                        code: 1,
                    }),
                },
            };
            self.orders.append(&self.host.client, &order)?;
        }
        Ok(())
    }

    /// Hosts a store for a round's ranks and finds a port for rank 0: (MASTER_PORT, the store's).
    fn open_round(&mut self, round: usize) -> std::result::Result<(u16, u16), String> {
        let secret = Secret::from_text(&ranks_secret(&self.host.secret, &self.host.run_id, round));
        let secret = secret.map_err(|error| error.to_string())?;
        // The last round's store goes first: its port is free again.
        self.ranks_store = None;
        let preferred = |after: u16| self.host.main_port.checked_add(after).unwrap_or(0);
        let at = self.host.listens_at;
        let store = StoreServer::start((at, preferred(2)), secret.clone());
        let store = store.or_else(|_| StoreServer::start((at, 0), secret));
        let store = store.map_err(|error| error.to_string())?;
        let free = TcpListener::bind((at, preferred(1))).or_else(|_| TcpListener::bind((at, 0)));
        let free = free.and_then(|listener| listener.local_addr());
        let main_port = free.map_err(|error| error.to_string())?.port();
        let store_port = store.address().port();
        self.ranks_store = Some(store);
        Ok((main_port, store_port))
    }
}

/// The secret of one round's ranks, which every launcher can tell and which crosses no wire.
pub(super) fn ranks_secret(of_launchers: &str, run_id: &str, round: usize) -> String {
    format!("{of_launchers}, run {run_id}, round {round}")
}
