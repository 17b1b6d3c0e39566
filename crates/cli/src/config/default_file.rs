//! The configuration file that counts where none is named: Accelerate's own, so that both systems have one.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::command_error::CommandError;

/// Returns Accelerate's default path, whether or not there is a file.
///
/// # Errors
/// When no variable says where it is.
pub(super) fn default_file() -> Result<PathBuf, CommandError> {
    let file = file_by(|name| std::env::var_os(name).filter(|value| !value.is_empty()));
    file.ok_or_else(|| {
        CommandError::usage("HOME is not set, so that there is no default configuration file")
            .hint("name one: --config_file FILE")
    })
}

fn file_by(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let cache = || {
        let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
        cache.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".cache")))
    };
    let folder = variable("HF_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(cache()?.join("huggingface")));
    Some(folder?.join("accelerate/default_config.yaml"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_file_is_accelerates() {
        let all = [("HF_HOME", "/hf"), ("XDG_CACHE_HOME", "/cache"), ("HOME", "/me")];
        let files = ["/hf", "/cache/huggingface", "/me/.cache/huggingface"];
        for (unset, folder) in files.into_iter().enumerate() {
            let set = &all[unset..];
            let found = file_by(|name| set.iter().find(|(of, _)| *of == name).map(|(_, value)| value.into()));
            assert_eq!(
                found,
                Some(PathBuf::from(folder).join("accelerate/default_config.yaml"))
            );
        }
        assert_eq!(file_by(|_| None), None);
    }
}
