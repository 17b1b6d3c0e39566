//! The configuration file that `sconce launch` reads where none is named.

use sconce_core::config::{Configuration, default_file};

use super::Report;

pub(super) fn tell(report: &mut Report, lookup: impl Fn(&str) -> Option<String>) {
    let value = match default_file(lookup) {
        Some(file) if file.is_file() => match Configuration::read(&file) {
            Ok(configuration) => {
                let values = configuration
                    .iter()
                    .map(|(setting, given)| format!("{}={}", setting.path, given.value));
                format!("{}: {}", file.display(), Vec::from_iter(values).join(" "))
            }
            Err(error) => format!("cannot be used: {error}"),
        },
        Some(file) => format!("none ({} is not there)", file.display()),
        None => "none".to_owned(),
    };
    report.add("configuration", value);
}
