//! Connections to a running store: whatever a peer sends, before or after it has proved who it is, the others are served.

use std::io::Write as _;
use std::net::{Shutdown, TcpStream};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sconce_collectives::store::{Secret, StoreClient, StoreServer, fuzzing};

/// How many inputs go by between two looks whether the store still serves.
const BETWEEN_CHECKS: u64 = 32;
const PATIENCE: Duration = Duration::from_secs(10);

struct Store {
    server: StoreServer,
    secret: Secret,
    good_client: StoreClient,
}

static STORE: LazyLock<Store> = LazyLock::new(|| {
    let secret = Secret::random();
    let server = StoreServer::start("127.0.0.1:0", secret.clone()).expect("loopback can be listened on");
    let address = server.address().to_string();
    Store {
        good_client: StoreClient::connect(&address, &secret, PATIENCE).expect("the store is up"),
        server,
        secret,
    }
});
static INPUTS: AtomicU64 = AtomicU64::new(0);

/// Sends bytes to a store. The first says whether the connection is authenticated before.
pub fn run(data: &[u8]) {
    let Some((&kind, sent)) = data.split_first() else {
        return;
    };
    let address = STORE.server.address();
    let stream = if kind % 2 == 0 {
        TcpStream::connect(address).ok()
    } else {
        fuzzing::authenticated(&address.to_string(), &STORE.secret, PATIENCE)
    };
    if let Some(mut stream) = stream {
        let _ = stream.write_all(sent);
        let _ = stream.shutdown(Shutdown::Write);
    }
    if INPUTS.fetch_add(1, Ordering::Relaxed).is_multiple_of(BETWEEN_CHECKS) {
        let client = &STORE.good_client;
        // The peers of this store are authenticated, and may have filled it.
        if client.set("good", b"value").is_ok() {
            assert_eq!(client.wait("good", PATIENCE).expect("the store serves"), b"value");
        }
    }
}
