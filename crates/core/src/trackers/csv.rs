//! A table for spreadsheets, whose columns grow with the names that are logged.

use super::append_file::{AppendFile, replace};
use super::{Moment, Run, Tracker, TrackerError};
use std::fs;
use std::path::PathBuf;

/// Writes `PROJECT/metrics.csv`: `step`, `wall_time` in seconds since 1970, and a column for every name.
///
/// When a name comes up for the first time the file is written anew beside the old one, which it then replaces: at every
/// moment there is one whole table. A run that goes on in the same folder adds to it.
#[derive(Debug)]
pub struct Csv {
    folder: PathBuf,
    open: Option<Table>,
}

#[derive(Debug)]
struct Table {
    file: AppendFile,
    names: Vec<String>,
}

/// What every row begins with.
const FIRST: &str = "step,wall_time";

impl Csv {
    /// Makes a tracker that writes below `folder`.
    pub fn boxed(folder: impl Into<PathBuf>) -> Box<dyn Tracker> {
        Box::new(Self {
            folder: folder.into(),
            open: None,
        })
    }
}

impl Tracker for Csv {
    fn name(&self) -> &str {
        "csv"
    }

    fn start(&mut self, run: &Run) -> Result<(), TrackerError> {
        let path = self.folder.join(run.project()).join("metrics.csv");
        self.open = Some(Table::open(path)?);
        Ok(())
    }

    fn log(&mut self, values: &[(&str, f64)], at: Moment) -> Result<(), TrackerError> {
        let Some(table) = &mut self.open else { return Ok(()) };
        for (name, _) in values {
            if *name == "step" || *name == "wall_time" || name.chars().any(char::is_control) {
                return Err(TrackerError::Name {
                    name: (*name).into(),
                    reason: "a column cannot have it: step and wall_time are taken, and a name is one line",
                });
            }
        }
        let is_new = |name: &&str| !table.names.iter().any(|known| known == name);
        let new = Vec::from_iter(values.iter().map(|(name, _)| *name).filter(is_new));
        if !new.is_empty() {
            table.widen(&new)?;
        }
        let mut row = format!("{},{}", at.step, at.wall_time);
        for column in &table.names {
            row.push(',');
            if let Some((_, value)) = values.iter().find(|(name, _)| name == column) {
                row += &value.to_string();
            }
        }
        row.push('\n');
        table.file.write(&row)
    }
}

impl Table {
    fn open(path: PathBuf) -> Result<Self, TrackerError> {
        let mut file = AppendFile::open(path)?;
        if file.is_empty()? {
            file.write(&format!("{FIRST}\n"))?;
            return Ok(Self {
                file,
                names: Vec::new(),
            });
        }
        let text = fs::read_to_string(file.path()).map_err(TrackerError::at(file.path()))?;
        let header = text.lines().next().unwrap_or_default();
        match header.strip_prefix(FIRST).and_then(names_of) {
            Some(names) => Ok(Self { file, names }),
            None => Err(TrackerError::Foreign {
                path: file.path().into(),
                reason: "it does not begin with the columns step and wall_time",
            }),
        }
    }

    /// Adds columns, which are empty in all rows so far.
    fn widen(&mut self, new: &[&str]) -> Result<(), TrackerError> {
        let path = self.file.path().to_owned();
        let old = fs::read_to_string(&path).map_err(TrackerError::at(&path))?;
        let before = self.names.len();
        for name in new {
            // Once, also where a name stands twice in a call.
            if !self.names.iter().any(|known| known == name) {
                self.names.push((*name).into());
            }
        }
        let mut text = String::from(FIRST);
        let added = ",".repeat(self.names.len() - before);
        self.names.iter().for_each(|name| text += &format!(",{}", quoted(name)));
        text.push('\n');
        for row in old.lines().skip(1) {
            text += &format!("{row}{added}\n");
        }
        replace(&path, &text)?;
        self.file = AppendFile::open(path)?;
        Ok(())
    }
}

fn quoted(name: &str) -> String {
    if name.contains([',', '"']) {
        format!("\"{}\"", name.replace('"', "\"\""))
    } else {
        name.into()
    }
}

/// Returns the names in a header, each behind a comma.
fn names_of(mut header: &str) -> Option<Vec<String>> {
    let mut names = Vec::new();
    while let Some(rest) = header.strip_prefix(',') {
        let Some(mut rest) = rest.strip_prefix('"') else {
            let end = rest.find(',').unwrap_or(rest.len());
            names.push(rest[..end].into());
            header = &rest[end..];
            continue;
        };
        let mut name = String::new();
        loop {
            let (part, after) = rest.split_once('"')?;
            name += part;
            let Some(more) = after.strip_prefix('"') else {
                header = after;
                break;
            };
            name.push('"');
            rest = more;
        }
        names.push(name);
    }
    header.is_empty().then_some(names)
}
