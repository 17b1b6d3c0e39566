//! Hosts that are network namespaces of this one, joined by a virtual switch.
//!
//! Each has a network and a host name of its own. They need root and iproute2, and change nothing outside of them.

use anyhow::{Result, ensure};
use xshell::{Cmd, Shell, cmd};

/// Says whether this machine lets this process make hosts.
///
/// # Errors
/// Why not, in words.
pub(crate) fn can_be_made(shell: &Shell) -> Result<(), String> {
    let answers = |command: Cmd<'_>| command.quiet().ignore_stdout().ignore_stderr().run().is_ok();
    if !is_root(shell) {
        return Err("network namespaces need root".into());
    }
    if !answers(cmd!(shell, "ip -V")) {
        return Err("there is no ip in PATH (Debian: iproute2)".into());
    }
    let name = format!("sconce-{}-probe", std::process::id());
    let is_made = answers(cmd!(shell, "ip netns add {name}"));
    let has_switch = is_made && answers(cmd!(shell, "ip -n {name} link add name switch type bridge"));
    let is_entered = has_switch && answers(cmd!(shell, "ip netns exec {name} unshare --uts true"));
    let is_removed = !is_made || answers(cmd!(shell, "ip netns del {name}"));
    if is_entered && is_removed {
        Ok(())
    } else {
        Err("this system allows no network namespaces".into())
    }
}

fn is_root(shell: &Shell) -> bool {
    cmd!(shell, "id -u").quiet().read().is_ok_and(|id| id == "0")
}

/// Joined network namespaces. They go when this is dropped.
pub(crate) struct Namespaces<'s> {
    pub(crate) shell: &'s Shell,
    /// Their names, which are also the hosts' names.
    pub(crate) names: Vec<String>,
    /// Their addresses, from a range that is for such things (RFC 2544).
    pub(crate) addresses: Vec<String>,
}

impl<'s> Namespaces<'s> {
    /// Makes `count` hosts.
    ///
    /// # Errors
    /// When this process is not root, or the system allows none.
    pub(crate) fn make(shell: &'s Shell, count: usize) -> Result<Self> {
        ensure!(is_root(shell), "network namespaces can be made by root only");
        let process = std::process::id();
        let hosts = Self {
            shell,
            names: (1..=count).map(|number| format!("sconce-{process}-{number}")).collect(),
            addresses: (1..=count).map(|number| format!("198.18.0.{number}")).collect(),
        };
        let ip = |words: String| cmd!(shell, "ip").args(words.split(' ')).quiet().run();
        let first = &hosts.names[0];
        for name in &hosts.names {
            ip(format!("netns add {name}"))?;
            ip(format!("-n {name} link set lo up"))?;
        }
        // The switch lies in the first host, whose own end of it has the address.
        ip(format!("-n {first} link add name switch type bridge"))?;
        ip(format!("-n {first} addr add {}/24 dev switch", hosts.addresses[0]))?;
        ip(format!("-n {first} link set switch up"))?;
        for (number, (name, address)) in hosts.names.iter().zip(&hosts.addresses).enumerate().skip(1) {
            let port = format!("port{number}");
            ip(format!(
                "-n {first} link add {port} type veth peer name cable netns {name}"
            ))?;
            ip(format!("-n {first} link set {port} master switch up"))?;
            ip(format!("-n {name} addr add {address}/24 dev cable"))?;
            ip(format!("-n {name} link set cable up"))?;
        }
        Ok(hosts)
    }

    /// The words that run a line of the shell on a host.
    pub(crate) fn on(&self, host: usize, line: &str) -> Vec<String> {
        let name = &self.names[host];
        let line = format!("hostname {name}; {line}");
        let words = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", &line];
        words.map(str::to_owned).to_vec()
    }
}

impl Drop for Namespaces<'_> {
    fn drop(&mut self) {
        for name in &self.names {
            // It may not have come to be.
            let _ = cmd!(self.shell, "ip netns del {name}").quiet().ignore_stderr().run();
        }
    }
}
