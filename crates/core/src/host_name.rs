//! The name of the host that this process runs on.

/// Returns the name that the system has for this host, without a domain's; empty where it has none.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
