//! Frames of the rendezvous store: any bytes are a request or a response, or malformed.

/// Decodes a frame both as a request and as a response.
pub fn run(data: &[u8]) {
    if let Some(encoded) = sconce_collectives::store::fuzzing::encoded_again(data) {
        assert_eq!(encoded, data, "a request has one encoding");
    }
}
