//! A member's connection to the coordinator: orders come in and reports go out by threads, while the main thread watches
//! its ranks.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sconce_collectives::store::StoreClient;

use super::journal::{Journal, ORDERS, REPORTS, beat_key};
use super::messages::{Order, Report};

/// How long one wait for an order lasts; then the next begins.
const WAIT: Duration = Duration::from_secs(60);
/// How long the last report may take.
const LAST_REPORT: Duration = Duration::from_secs(2);

/// Word from the coordinator.
#[derive(Debug)]
pub(super) enum Word {
    Order(Order),
    /// The store cannot be reached any more, and why.
    Lost(String),
}

/// The connection of one member.
#[derive(Debug)]
pub(super) struct Link {
    words: Receiver<Word>,
    /// One byte for each word.
    wake: PipeReader,
    reports: Option<Sender<Report>>,
    all_sent: Receiver<()>,
    last_beat: Arc<Mutex<Instant>>,
    keep_alive: Duration,
}

/// Where the threads put words.
#[derive(Debug)]
struct Inbox {
    words: Sender<Word>,
    wake: PipeWriter,
}

impl Inbox {
    /// Returns whether anybody still reads.
    fn put(&mut self, word: Word) -> bool {
        self.words.send(word).is_ok() && self.wake.write_all(&[0]).is_ok()
    }
}

impl Link {
    /// Starts the threads of the member `id`, each with a client of its own.
    ///
    /// # Errors
    /// When the system gives no thread or pipe.
    pub(super) fn start(
        id: String,
        clients: [StoreClient; 2],
        interval: Duration,
        keep_alive: Duration,
    ) -> io::Result<Self> {
        let [for_orders, for_reports] = clients;
        let (words_in, words) = mpsc::channel();
        let (wake, wake_in) = io::pipe()?;
        let mut orders_in = Inbox {
            words: words_in,
            wake: wake_in,
        };
        let mut losses_in = Inbox {
            words: orders_in.words.clone(),
            wake: orders_in.wake.try_clone()?,
        };
        let (reports, reports_out) = mpsc::channel();
        let (sent, all_sent) = mpsc::channel();
        let last_beat = Arc::new(Mutex::new(Instant::now()));
        let beat = Arc::clone(&last_beat);
        thread::Builder::new().name("orders".to_owned()).spawn(move || {
            let mut journal = Journal::new(ORDERS);
            loop {
                let word = match journal.read(&for_orders, WAIT) {
                    Ok(None) => continue,
                    Ok(Some(order)) => Word::Order(order),
                    Err(error) => Word::Lost(error.to_string()),
                };
                let is_last = matches!(word, Word::Lost(_));
                if !orders_in.put(word) || is_last {
                    return;
                }
            }
        })?;
        thread::Builder::new().name("reports".to_owned()).spawn(move || {
            if let Err(error) = report(&id, &for_reports, interval, &reports_out, &beat) {
                losses_in.put(Word::Lost(error.to_string()));
            }
            let _ = sent.send(());
        })?;
        Ok(Self {
            words,
            wake,
            reports: Some(reports),
            all_sent,
            last_beat,
            keep_alive,
        })
    }

    /// Sends a report, behind those before it. Where the store is lost, that is told as a word.
    pub(super) fn send(&self, report: Report) {
        if let Some(reports) = &self.reports {
            let _ = reports.send(report);
        }
    }

    /// Sends the last report and returns when it is there, or not after long.
    pub(super) fn close(mut self, last: Report) {
        self.send(last);
        self.reports = None;
        let _ = self.all_sent.recv_timeout(LAST_REPORT);
    }

    /// A descriptor that becomes readable when there is a word.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The next word, if there is one.
    pub(super) fn take(&mut self) -> Option<Word> {
        let word = self.words.try_recv().ok()?;
        // It comes right after the word.
        let _ = self.wake.read_exact(&mut [0]);
        Some(word)
    }

    /// When this member must count itself as cut off, unless a beat reaches the store before.
    pub(super) fn cut_off_at(&self) -> Instant {
        *self.last_beat.lock().unwrap_or_else(PoisonError::into_inner) + self.keep_alive
    }
}

/// Sends reports as they come, and beats in between, until nobody sends any more.
fn report(
    id: &str,
    client: &StoreClient,
    interval: Duration,
    reports: &Receiver<Report>,
    last_beat: &Mutex<Instant>,
) -> sconce_collectives::Result<()> {
    let mut journal = Journal::new(REPORTS);
    let key = beat_key(id);
    let mut next_beat = Instant::now();
    for number in 0_u64.. {
        client.set(&key, &number.to_le_bytes())?;
        *last_beat.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        next_beat += interval;
        loop {
            match reports.recv_timeout(next_beat.saturating_duration_since(Instant::now())) {
                Ok(report) => journal.append(client, &report)?,
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
        next_beat = next_beat.max(Instant::now());
    }
    Ok(())
}
