//! Requests to a server of MLflow.
//!
//! Source: <https://mlflow.org/docs/latest/rest-api.html>.

use super::super::TrackerError;
use serde_json::{Value, json};
use std::fmt;
use std::thread;
use std::time::Duration;

/// The end of every request, whatever the server does.
const LONGEST_REQUEST: Duration = Duration::from_secs(10);
/// Pauses before a request is sent again that the server did not get or could not serve.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(15),
];

/// A server, and how to speak with it.
pub(super) struct Rest {
    agent: ureq::Agent,
    address: String,
    token: Option<String>,
}

/// What became of a request that did not succeed.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is no such thing.
    Missing(String),
    /// Asked again, the server would say the same.
    Refused(String),
    /// Nobody answered, or the server is in trouble.
    Unavailable(String),
}

impl Rest {
    pub(super) fn new(address: &str, token: Option<String>) -> Self {
        let settings = ureq::Agent::config_builder()
            .timeout_global(Some(LONGEST_REQUEST))
            .http_status_as_error(false)
            .user_agent(concat!("sconce/", env!("CARGO_PKG_VERSION")));
        Self {
            agent: settings.build().new_agent(),
            address: address.trim_end_matches('/').into(),
            token,
        }
    }

    pub(super) fn get(&self, method: &str, query: (&str, &str)) -> Result<Value, Failure> {
        let request = self.agent.get(self.path(method)).query(query.0, query.1);
        answer(self.authorized(request).call())
    }

    pub(super) fn post(&self, method: &str, body: &Value) -> Result<Value, Failure> {
        let request = self.agent.post(self.path(method));
        let request = request.header("Content-Type", "application/json");
        answer(self.authorized(request).send(body.to_string()))
    }

    /// Posts, and again after pauses while the server is not available.
    pub(super) fn post_patiently(&self, method: &str, body: &Value) -> Result<(), TrackerError> {
        let mut pauses = PAUSES.iter();
        loop {
            match self.post(method, body) {
                Err(Failure::Unavailable(reason)) => match pauses.next() {
                    Some(pause) => thread::sleep(*pause),
                    None => return Err(self.error(Failure::Unavailable(reason))),
                },
                other => return other.map(drop).map_err(|failure| self.error(failure)),
            }
        }
    }

    pub(super) fn error(&self, failure: Failure) -> TrackerError {
        let (Failure::Missing(reason) | Failure::Refused(reason) | Failure::Unavailable(reason)) = failure;
        TrackerError::Server {
            address: self.shown(),
            reason,
        }
    }

    /// The address without a password.
    fn shown(&self) -> String {
        let (scheme, rest) = self.address.split_once("://").unwrap_or(("http", &self.address));
        let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
        format!("{scheme}://{host}")
    }

    fn path(&self, method: &str) -> String {
        format!("{}/api/2.0/mlflow/{method}", self.address)
    }

    fn authorized<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.token {
            Some(token) => request.header("Authorization", format!("Bearer {token}")),
            None => request,
        }
    }
}

/// Says nothing of passwords and tokens.
impl fmt::Debug for Rest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Rest").field(&self.shown()).finish()
    }
}

fn answer(response: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Result<Value, Failure> {
    let unavailable = |error: ureq::Error| Failure::Unavailable(error.to_string());
    let mut response = response.map_err(unavailable)?;
    let status = response.status();
    let text = response.body_mut().read_to_string().map_err(unavailable)?;
    let body: Option<Value> = serde_json::from_str(&text).ok();
    if status.is_success() {
        return body.ok_or_else(|| Failure::Refused("it does not answer in JSON, as a server of MLflow does".into()));
    }
    let body = body.unwrap_or_else(|| json!({}));
    let code = body["error_code"].as_str().unwrap_or_default();
    let message = format!("{status} {code}: {}", body["message"].as_str().unwrap_or("no message"));
    Err(match status.as_u16() {
        404 if code == "RESOURCE_DOES_NOT_EXIST" => Failure::Missing(message),
        429 | 500..=599 => Failure::Unavailable(message),
        _ => Failure::Refused(message),
    })
}
