//! The file that is read where none is named.

use std::path::PathBuf;

/// Returns Accelerate's path: `accelerate/default_config.yaml` under `$HF_HOME`, else under `huggingface` in
/// `$XDG_CACHE_HOME` or `~/.cache`. `None` without a home.
pub fn default_file(lookup: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let given = |name| lookup(name).filter(|text| !text.is_empty());
    let folder = given("HF_HOME").map(PathBuf::from);
    let folder = folder.or_else(|| given("XDG_CACHE_HOME").map(|cache| PathBuf::from(cache).join("huggingface")));
    let folder = folder.or_else(|| given("HOME").map(|home| PathBuf::from(home).join(".cache/huggingface")));
    folder.map(|folder| folder.join("accelerate/default_config.yaml"))
}
