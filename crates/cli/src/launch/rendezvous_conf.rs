//! `--rdzv_conf`: times and secret of the meeting of several launchers, by torchrun's keys where it has them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Keys that are known, each with what torchrun or we call it.
const KEYS: &str = "timeout (or join_timeout), last_call_timeout, keep_alive_timeout, secret, id";

/// What `--rdzv_conf` says; what it leaves out has a default.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct RendezvousConf {
    /// How long launchers wait until enough machines are there.
    pub(super) timeout: Duration,
    /// How long they wait for more than the least number.
    pub(super) last_call: Duration,
    /// After how long a silent machine counts as gone.
    pub(super) keep_alive: Duration,
    /// The secret that lets launchers in.
    pub(super) secret: Option<String>,
    /// The run's name, the same on all machines.
    pub(super) id: Option<String>,
}

impl Default for RendezvousConf {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            last_call: Duration::from_secs(10),
            keep_alive: Duration::from_secs(5),
            secret: None,
            id: None,
        }
    }
}

impl FromStr for RendezvousConf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut conf = Self::default();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| format!("`{pair}` is not KEY=VALUE"))?;
            match key.trim() {
                "timeout" | "join_timeout" => conf.timeout = seconds(key, value)?,
                "last_call_timeout" => conf.last_call = seconds(key, value)?,
                "keep_alive_timeout" => conf.keep_alive = seconds(key, value)?,
                "secret" => conf.secret = Some(value.to_owned()),
                "id" => conf.id = Some(value.to_owned()),
                other => return Err(format!("there is no key `{other}`; the keys are {KEYS}")),
            }
        }
        Ok(conf)
    }
}

fn seconds(key: &str, value: &str) -> Result<Duration, String> {
    let parsed = value.trim().parse::<f64>().ok();
    let parsed = parsed.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    parsed
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| format!("{key}={value}: a number of seconds above 0 is needed"))
}

impl fmt::Debug for RendezvousConf {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("RendezvousConf")
            .field("timeout", &self.timeout)
            .field("last_call", &self.last_call)
            .field("keep_alive", &self.keep_alive)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_and_what_is_left_out_has_a_default() {
        let conf: RendezvousConf = "join_timeout=30, keep_alive_timeout=0.5,secret=a=b".parse().unwrap();
        assert_eq!(conf.timeout, Duration::from_secs(30));
        assert_eq!(conf.keep_alive, Duration::from_millis(500));
        assert_eq!(conf.last_call, RendezvousConf::default().last_call);
        assert_eq!(conf.secret.as_deref(), Some("a=b"));
        assert!(!format!("{conf:?}").contains("a=b"), "a secret is not shown");
        assert_eq!("".parse(), Ok(RendezvousConf::default()));
    }

    #[test]
    fn what_is_no_setting_is_refused_by_name() {
        for (text, part) in [
            ("timeot=3", "no key `timeot`"),
            ("timeout", "`timeout` is not KEY=VALUE"),
            ("timeout=-1", "above 0"),
            ("timeout=0", "above 0"),
            ("timeout=soon", "above 0"),
        ] {
            let error = text.parse::<RendezvousConf>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
