//! Where rank 0 may listen: the address and port that MASTER_ADDR and MASTER_PORT name.
//!
//! Sconce's own ranks meet at the launcher's store; programs that bring their own rendezvous use this pair, as they
//! would under torchrun.

use std::io;
use std::net::TcpListener;

use crate::command_error::CommandError;

/// The address and port on which rank 0 may listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MainProcess {
    pub(super) address: String,
    pub(super) port: u16,
}

impl MainProcess {
    /// Checks the address and port that the user asked for; without a port (or with 0), finds a free one.
    ///
    /// The port is free when this returns. Nothing keeps it so until rank 0 listens there: that is how MASTER_PORT
    /// works under every launcher.
    ///
    /// # Errors
    /// When the address is not this host's or the port is taken.
    pub(super) fn choose(address: Option<&str>, port: Option<u16>) -> Result<Self, CommandError> {
        let address = address.unwrap_or("127.0.0.1");
        let wanted = port.unwrap_or(0);
        let port = TcpListener::bind((address, wanted))
            .and_then(|listener| listener.local_addr())
            .map_err(|reason| refusal(address, wanted, &reason))?
            .port();
        Ok(Self {
            address: address.to_owned(),
            port,
        })
    }
}

fn refusal(address: &str, port: u16, reason: &io::Error) -> CommandError {
    match reason.kind() {
        io::ErrorKind::AddrInUse => CommandError::usage(format!("port {port} of {address} is in use"))
            .hint("leave --main_process_port out, and a free port is chosen"),
        io::ErrorKind::AddrNotAvailable => CommandError::usage(format!("{address} is not an address of this host"))
            .hint("all ranks run on this host: leave --main_process_ip out, or give one of the host's addresses"),
        _ => CommandError::usage(format!("cannot listen at {address}, port {port}: {reason}"))
            .hint("check --main_process_ip and --main_process_port"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_port_is_chosen_unless_one_is_asked_for() {
        let chosen = MainProcess::choose(None, None).unwrap();
        assert_eq!(chosen.address, "127.0.0.1");
        assert_ne!(chosen.port, 0);
        assert_eq!(MainProcess::choose(None, Some(chosen.port)).unwrap(), chosen);
    }

    #[test]
    fn a_port_in_use_is_refused() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let error = MainProcess::choose(None, Some(port)).unwrap_err().to_string();
        assert!(
            error.contains(&format!("port {port} of 127.0.0.1 is in use")),
            "{error}"
        );
    }

    #[test]
    fn an_address_of_another_host_is_refused() {
        // 192.0.2.0/24 is reserved for documentation (RFC 5737): no host has it.
        let error = MainProcess::choose(Some("192.0.2.1"), None).unwrap_err().to_string();
        assert!(error.contains("192.0.2.1 is not an address of this host"), "{error}");
    }
}
