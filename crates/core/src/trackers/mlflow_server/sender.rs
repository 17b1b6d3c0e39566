//! What sends metrics while training goes on.

use super::super::TrackerError;
use super::rest::Rest;
use serde_json::{Value, json};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

/// The most calls of `log` that wait to be sent.
pub(super) const LONGEST_QUEUE: usize = 4096;
/// The most metrics in a request, as MLflow limits them.
const MOST_METRICS: usize = 1000;

/// A thread that sends what it is given, in order, until something cannot be sent.
#[derive(Debug)]
pub(super) struct Sender {
    queue: SyncSender<Vec<Value>>,
    /// Milliseconds since 1970 at which the run has ended, if it has: the thread sends that last.
    end: Arc<OnceLock<u64>>,
    /// How the thread has ended.
    outcome: Receiver<Result<(), TrackerError>>,
}

impl Sender {
    pub(super) fn start(rest: Rest, run: String) -> Result<Self, TrackerError> {
        let (queue, waiting) = mpsc::sync_channel(LONGEST_QUEUE);
        let (told, outcome) = mpsc::channel();
        let end = Arc::new(OnceLock::new());
        let thread = thread::Builder::new().name("mlflow".into());
        let thread = thread.spawn({
            let end = Arc::clone(&end);
            move || {
                let sent = send_all(&rest, &run, &waiting, &end);
                // The other side first sees that it is told, then that nobody takes more.
                drop(told.send(sent));
            }
        });
        thread.map_err(|error| TrackerError::Other(error.into()))?;
        Ok(Self { queue, end, outcome })
    }

    /// Has metrics sent; waits for nothing.
    pub(super) fn send(&self, metrics: Vec<Value>) -> Result<(), TrackerError> {
        match self.queue.try_send(metrics) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => Err(too_slow(format!("it is {LONGEST_QUEUE} calls of `log` behind"))),
            Err(TrySendError::Disconnected(_)) => self.outcome.try_recv().unwrap_or_else(|_| Err(ended())),
        }
    }

    /// Has the end of the run sent, and waits until all is sent, or `deadline` has passed.
    pub(super) fn finish(self, at: u64, deadline: Duration) -> Result<(), TrackerError> {
        // Nobody else sets it.
        let _ = self.end.set(at);
        drop(self.queue);
        match self.outcome.recv_timeout(deadline) {
            Ok(outcome) => outcome,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let seconds = deadline.as_secs_f64();
                Err(too_slow(format!(
                    "it has not taken the run's last values within {seconds} s"
                )))
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(ended()),
        }
    }
}

fn send_all(rest: &Rest, run: &str, waiting: &Receiver<Vec<Value>>, end: &OnceLock<u64>) -> Result<(), TrackerError> {
    while let Ok(mut metrics) = waiting.recv() {
        // What came while the last request was under way goes with one request.
        while metrics.len() < MOST_METRICS
            && let Ok(more) = waiting.try_recv()
        {
            metrics.extend(more);
        }
        for metrics in metrics.chunks(MOST_METRICS) {
            rest.post_patiently("runs/log-batch", &json!({"run_id": run, "metrics": metrics}))?;
        }
    }
    let Some(end) = end.get() else { return Ok(()) };
    let end = json!({"run_id": run, "status": "FINISHED", "end_time": end});
    rest.post_patiently("runs/update", &end)
}

fn too_slow(reason: String) -> TrackerError {
    TrackerError::Server {
        address: "the server of MLflow".into(),
        reason,
    }
}

fn ended() -> TrackerError {
    too_slow("the thread that speaks with it has ended".into())
}
