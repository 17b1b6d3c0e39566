//! Send and receive: a mailbox of two pieces for every ordered pair of ranks.
//!
//! The sender writes piece `n` while `n - consumed < PIECES` and then publishes `sent = n + 1`; the receiver reads it
//! while `sent > n` and then publishes `consumed = n + 1`. The first piece of a message carries its signature.

use super::group::Passage;
use super::layout::{PIECE, PIECES};
use super::waiting::{nap, publish, wait};
use crate::collective::{Kind, Signature};
use crate::private::Private;
use crate::{ElementType, Elements, ElementsMut, Result};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

/// One direction of a message under way.
#[derive(Debug)]
struct Transfer {
    peer: usize,
    memory: Private,
    element: ElementType,
    count: usize,
    /// Pieces moved so far.
    moved: usize,
    pieces: usize,
}

impl Transfer {
    fn new(peer: usize, memory: Private, element: ElementType) -> Self {
        let pieces = memory.len().div_ceil(PIECE).max(1);
        Self {
            peer,
            memory,
            element,
            count: memory.len() / element.size(),
            moved: 0,
            pieces,
        }
    }

    fn next_piece(&self) -> Private {
        let start = self.moved * PIECE;
        self.memory.part(start..(start + PIECE).min(self.memory.len()))
    }

    fn is_done(&self) -> bool {
        self.moved == self.pieces
    }
}

impl Passage<'_> {
    pub(super) fn exchange_messages(
        &mut self,
        send: Option<(Elements<'_>, usize)>,
        receive: Option<(ElementsMut<'_>, usize)>,
    ) -> Result<()> {
        let mut send = send.map(|(values, to)| Transfer::new(to, Private::of(values.bytes()), values.element()));
        let mut receive = receive.map(|(mut values, from)| {
            let element = values.element();
            Transfer::new(from, Private::of_mut(values.bytes_mut()), element)
        });
        let mut idle: Option<Instant> = None;
        loop {
            let mut progressed = false;
            if let Some(transfer) = send.as_mut().filter(|transfer| !transfer.is_done()) {
                progressed |= self.try_send(transfer);
            }
            if let Some(transfer) = receive.as_mut().filter(|transfer| !transfer.is_done()) {
                progressed |= self.try_receive(transfer)?;
            }
            let sending = send.as_ref().filter(|transfer| !transfer.is_done());
            let receiving = receive.as_ref().filter(|transfer| !transfer.is_done());
            match (sending, receiving) {
                (None, None) => return Ok(()),
                _ if progressed => idle = None,
                (Some(sending), Some(receiving)) => {
                    let since = *idle.get_or_insert_with(Instant::now);
                    self.wait_for_either(sending, receiving, since.elapsed())?;
                }
                (Some(transfer), None) => self.wait_for_room(transfer)?,
                (None, Some(transfer)) => self.wait_for_piece(transfer)?,
            }
        }
    }

    fn try_send(&mut self, transfer: &mut Transfer) -> bool {
        let (group, peer) = (self.group, transfer.peer);
        let (sent, consumed) = group.segment.mailbox_counters(group.rank, peer);
        let number = self.engine.sent[peer];
        if number.wrapping_sub(consumed.load(Acquire)) as usize >= PIECES {
            return false;
        }
        let layout = group.segment.layout();
        let piece = number as usize;
        transfer
            .next_piece()
            .copy_to(&group.segment, layout.mailbox_piece(group.rank, peer, piece), 0);
        if transfer.moved == 0 {
            let signature = message_signature(transfer);
            let (word, count) = group.segment.mailbox_signature(group.rank, peer, piece);
            word.store(signature.pack(), Relaxed);
            count.store(signature.count, Relaxed);
        }
        transfer.moved += 1;
        self.engine.sent[peer] = number.wrapping_add(1);
        publish(group.segment.control(), sent, number.wrapping_add(1));
        true
    }

    fn try_receive(&mut self, transfer: &mut Transfer) -> Result<bool> {
        let (group, peer) = (self.group, transfer.peer);
        let (sent, consumed) = group.segment.mailbox_counters(peer, group.rank);
        let number = self.engine.received[peer];
        if sent.load(Acquire).wrapping_sub(number) as i32 <= 0 {
            return Ok(false);
        }
        let piece = number as usize;
        if transfer.moved == 0 {
            let expected = message_signature(transfer);
            let (word, count) = group.segment.mailbox_signature(peer, group.rank, piece);
            let found = Signature::unpack(word.load(Relaxed), count.load(Relaxed));
            if found != Some(expected) {
                let sends = found.map_or_else(|| "an unknown message".into(), |found| found.to_string());
                let receives = format!("receive of {} {}", transfer.count, transfer.element.name());
                return Err(self.mismatch(
                    self.engine.sequence,
                    [(peer, sends), (group.rank, receives)].into_iter(),
                ));
            }
        }
        let slot = group.segment.layout().mailbox_piece(peer, group.rank, piece);
        transfer.next_piece().copy_from(&group.segment, slot, 0);
        transfer.moved += 1;
        self.engine.received[peer] = number.wrapping_add(1);
        publish(group.segment.control(), consumed, number.wrapping_add(1));
        Ok(true)
    }

    /// Waits until the peer has consumed a piece.
    fn wait_for_room(&self, transfer: &Transfer) -> Result<()> {
        let (_, consumed) = self.group.segment.mailbox_counters(self.group.rank, transfer.peer);
        let number = self.engine.sent[transfer.peer];
        self.wait_for(transfer.peer, consumed, |seen| {
            (number.wrapping_sub(seen) as usize) < PIECES
        })
    }

    /// Waits until the peer has sent a piece.
    fn wait_for_piece(&self, transfer: &Transfer) -> Result<()> {
        let (sent, _) = self.group.segment.mailbox_counters(transfer.peer, self.group.rank);
        let number = self.engine.received[transfer.peer];
        self.wait_for(transfer.peer, sent, |seen| seen.wrapping_sub(number) as i32 > 0)
    }

    fn wait_for(&self, peer: usize, word: &AtomicU32, ready: impl Fn(u32) -> bool) -> Result<()> {
        wait(self.group.segment.control(), word, self.patience, &ready, |waited| {
            self.check_peer(peer, waited, &|| ready(word.load(Acquire)))
        })
    }

    /// Waits a little for a message that comes while another goes: neither word alone may block the other.
    fn wait_for_either(&self, sending: &Transfer, receiving: &Transfer, waited: Duration) -> Result<()> {
        if waited < Duration::from_micros(200) {
            rustix::thread::sched_yield();
            return Ok(());
        }
        self.check_peer(sending.peer, waited, &|| false)?;
        self.check_peer(receiving.peer, waited, &|| false)?;
        let (sent, _) = self.group.segment.mailbox_counters(receiving.peer, self.group.rank);
        nap(self.group.segment.control(), sent, self.engine.received[receiving.peer]);
        Ok(())
    }

    /// Looks after a peer as for collectives, and finds a peer that waits in a collective for this very rank.
    fn check_peer(&self, peer: usize, waited: Duration, came: &dyn Fn() -> bool) -> Result<()> {
        let entered = self.line(peer).entered.load(Relaxed);
        self.look_after(peer, waited, &|rank| rank == peer && came())?;
        let own = self.engine.sequence as u32;
        if entered.wrapping_sub(own) as i32 > 0 && !came() {
            let calls = [
                (self.group.rank, self.signature.to_string()),
                (peer, self.announced(peer, self.engine.sequence)),
            ];
            return Err(self.mismatch(self.engine.sequence, calls.into_iter()));
        }
        Ok(())
    }
}

fn message_signature(transfer: &Transfer) -> Signature {
    let kind = Kind::Send;
    Signature {
        element: Some(transfer.element),
        ..Signature::of_kind(kind, transfer.count as u64)
    }
}
