//! A server of MLflow, over HTTP.

mod rest;
mod sender;

use super::name_path::path_of_name;
use super::{Moment, Run, Tracker, TrackerError, json_lines, mlflow};
use rest::{Failure, Rest};
use sender::Sender;
use serde_json::{Value, json};
use std::time::Duration;

/// Sends a run to a server of MLflow: experiment, hyper-parameters and metrics. Texts and images it leaves out.
///
/// The experiment is the one that has the project's name, or a new one. The start of a run waits for the server, some ten
/// seconds a request at most. From then on a thread of its own sends, and training waits for nothing; what is logged
/// reaches the server within moments, not before [`log`](Tracker::log) returns. A server that is away for some 20 seconds
/// misses nothing. The end of a run waits until all is sent, or for 30 seconds.
#[derive(Debug)]
pub struct MlflowServer {
    address: Secret,
    token: Option<Secret>,
    deadline: Duration,
    sender: Option<Sender>,
}

/// What is told to nobody but the server: an address may have a password in it.
struct Secret(String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secret(..)")
    }
}

/// The most parameters in a request, as MLflow limits them.
const MOST_PARAMETERS: usize = 100;

impl MlflowServer {
    /// Makes a tracker for the server at an address such as `http://127.0.0.1:5000`, or `https://user:password@host`.
    pub fn new(address: impl Into<String>) -> Self {
        Self {
            address: Secret(address.into()),
            token: None,
            deadline: Duration::from_secs(30),
            sender: None,
        }
    }

    /// Sends a token with every request (`Authorization: Bearer TOKEN`).
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(Secret(token.into()));
        self
    }

    /// Says for how long the end of a run waits until all is sent.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

impl Tracker for MlflowServer {
    fn name(&self) -> &str {
        "mlflow"
    }

    fn start(&mut self, run: &Run) -> Result<(), TrackerError> {
        let rest = Rest::new(&self.address.0, self.token.as_ref().map(|token| token.0.clone()));
        let id = begin(&rest, run).map_err(|failure| rest.error(failure))?;
        self.sender = Some(Sender::start(rest, id)?);
        Ok(())
    }

    fn log(&mut self, values: &[(&str, f64)], at: Moment) -> Result<(), TrackerError> {
        let Some(sender) = &self.sender else { return Ok(()) };
        let mut metrics = Vec::with_capacity(values.len());
        for (name, value) in values {
            metrics.push(json!({
                "key": key(name)?, "value": json_lines::number(*value), "timestamp": at.milliseconds(), "step": at.step,
            }));
        }
        sender.send(metrics)
    }

    fn finish(&mut self) -> Result<(), TrackerError> {
        let sender = self.sender.take();
        sender.map_or(Ok(()), |sender| {
            sender.finish(Moment::now(0).milliseconds(), self.deadline)
        })
    }
}

/// Begins a run, with its parameters; returns its identity.
fn begin(rest: &Rest, run: &Run) -> Result<String, Failure> {
    let experiment = experiment(rest, run.project())?;
    let started = rest.post(
        "runs/create",
        &json!({
            "experiment_id": experiment, "start_time": Moment::now(0).milliseconds(),
            "tags": [{"key": "mlflow.source.type", "value": "LOCAL"}],
        }),
    )?;
    let id = text(&started, "/run/info/run_id")?;
    let mut parameters = Vec::new();
    for (name, value) in mlflow::parameters(run) {
        let key = key(&name).map_err(|error| Failure::Refused(error.to_string()))?;
        parameters.push(json!({"key": key, "value": value}));
    }
    for parameters in parameters.chunks(MOST_PARAMETERS) {
        rest.post("runs/log-batch", &json!({"run_id": id, "params": parameters}))?;
    }
    Ok(id)
}

/// Returns the experiment of this name, which is made if need be.
fn experiment(rest: &Rest, name: &str) -> Result<String, Failure> {
    match rest.get("experiments/get-by-name", ("experiment_name", name)) {
        Ok(found) => text(&found, "/experiment/experiment_id"),
        Err(Failure::Missing(_)) => {
            let made = rest.post("experiments/create", &json!({"name": name}))?;
            text(&made, "/experiment_id")
        }
        Err(failure) => Err(failure),
    }
}

fn text(answer: &Value, place: &str) -> Result<String, Failure> {
    let text = answer.pointer(place).and_then(Value::as_str);
    let text = text.ok_or_else(|| Failure::Refused(format!("its answer has no {place}, as MLflow's has: {answer}")));
    text.map(Into::into)
}

/// Returns a name with the characters that MLflow has in names.
fn key(name: &str) -> Result<String, TrackerError> {
    Ok(path_of_name(name)?.to_string_lossy().into_owned())
}
