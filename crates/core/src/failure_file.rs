//! The file in which a rank leaves its error for the launcher: torchrun and `sconce launch` tell it last, in its own words.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use sconce_collectives::environment::of_process;
use serde_json::json;

use crate::environment::TORCHELASTIC_ERROR_FILE;

/// Leaves `message` in the file that `TORCHELASTIC_ERROR_FILE` names, in the format of PyTorch's `record`; does nothing
/// where no launcher asks for it.
///
/// Called by a program that is about to end with an error. That nothing can be written is no further error: the program
/// prints its message all the same.
pub fn leave_for_launcher(message: &str) {
    if let Some(path) = of_process(TORCHELASTIC_ERROR_FILE).filter(|path| !path.is_empty()) {
        let _ = write(Path::new(&path), message);
    }
}

fn write(path: &Path, message: &str) -> std::io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let extra = json!({ "timestamp": now.as_secs().to_string() });
    let content = json!({ "message": { "message": message, "extraInfo": extra } });
    fs::write(path, content.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn torchs_reader_finds_message_and_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        write(&path, "no \"data\"\nat all").unwrap();
        let content: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        // What torch.distributed.elastic's ProcessFailure reads.
        assert_eq!(content["message"]["message"], "no \"data\"\nat all");
        let timestamp = content["message"]["extraInfo"]["timestamp"].as_str().unwrap();
        assert!(timestamp.parse::<u64>().unwrap() > 1_700_000_000);
    }
}
