//! Names of values as paths of files.

use super::TrackerError;
use std::path::PathBuf;

/// Returns the path of a name, in which `/` makes folders; other characters than letters, digits, `-`, `_`, `.` and blanks
/// become `_`, as MLflow and file systems have it.
pub(super) fn path_of_name(name: &str) -> Result<PathBuf, TrackerError> {
    let refuse = |reason| {
        Err(TrackerError::Name {
            name: name.into(),
            reason,
        })
    };
    if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return refuse("it is a path here, whose parts are not empty and not dots");
    }
    let fits = |character: char| character.is_alphanumeric() || "-_. /".contains(character);
    Ok(name
        .chars()
        .map(|character| if fits(character) { character } else { '_' })
        .collect::<String>()
        .into())
}
