//! Offline runs of Weights & Biases, which `wandb sync FOLDER/wandb/offline-run-*` uploads.

mod log_file;
mod record;

use super::append_file::write_file;
use super::calendar::Date;
use super::histogram::Histogram;
use super::name_path::path_of_name;
use super::{Moment, Run, Tracker, TrackerError, json_lines, png};
use crate::host_name::host_name;
use log_file::LogFile;
use prost::Message as _;
use record::{Exit, FileItem, Files, Header, History, Info, Item, Kind, Record, Step, Timestamp, Updates, Version};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

/// Writes `wandb/offline-run-DATE-ID/run-ID.wandb`, as the client of Weights & Biases writes it without a network, and images
/// below its folder `files`. Every start is a new run; it gets its name, and the entity, when it is uploaded.
///
/// A run has one row for each step, so what is logged for the same step is written as one row anew. The service takes steps
/// in ascending order only: what is logged for an earlier step is left out, with a warning. Dates are UTC.
#[derive(Debug)]
pub struct WandbOffline {
    folder: PathBuf,
    open: Option<OpenRun>,
}

#[derive(Debug)]
struct OpenRun {
    id: String,
    /// The run's files that are uploaded.
    files: PathBuf,
    log: LogFile,
    start: Moment,
    /// The number of the record that is written next, as long as no row is begun.
    next: i64,
    row: Option<Row>,
    has_warned: bool,
}

/// The values of the latest step.
#[derive(Debug)]
struct Row {
    step: u64,
    /// Where in the log it begins.
    place: u64,
    items: Vec<Item>,
    files: Vec<FileItem>,
}

/// How many parts a histogram has, as the client makes it.
const PARTS: usize = 64;
/// The oldest reader that the client's own files ask for (as of its versions 0.19 to 0.31, which count readers otherwise).
const LEAST_CONSUMER: &str = "0.40.0";

impl WandbOffline {
    /// Makes a tracker that writes into `folder`/wandb.
    pub fn boxed(folder: impl AsRef<Path>) -> Box<dyn Tracker> {
        Box::new(Self {
            folder: folder.as_ref().join("wandb"),
            open: None,
        })
    }
}

impl Tracker for WandbOffline {
    fn name(&self) -> &str {
        "wandb"
    }

    fn start(&mut self, run: &Run) -> Result<(), TrackerError> {
        let start = Moment::now(0);
        let (id, folder) = new_folder(&self.folder, run.project(), start)?;
        let files = folder.join("files");
        fs::create_dir(&files).map_err(TrackerError::at(&files))?;
        let mut open = OpenRun {
            log: LogFile::create(folder.join(format!("run-{id}.wandb")))?,
            id,
            files,
            start,
            next: 1,
            row: None,
            has_warned: false,
        };
        let version = Version {
            producer: concat!("sconce-", env!("CARGO_PKG_VERSION")).into(),
            least_consumer: LEAST_CONSUMER.into(),
        };
        open.write(Kind::Header(Header { version: Some(version) }))?;
        let config = run.config().iter().map(|(key, value)| Item {
            key: key.clone(),
            value: value.to_string(),
            ..Item::default()
        });
        open.write(Kind::Run(record::Run {
            id: open.id.clone(),
            project: run.project().into(),
            config: Some(Updates {
                items: config.collect(),
            }),
            host: host_name(),
            start: Some(Timestamp {
                seconds: start.wall_time as i64,
                nanoseconds: (start.wall_time.fract() * 1e9) as i32,
            }),
        }))?;
        self.open = Some(open);
        Ok(())
    }

    fn log(&mut self, values: &[(&str, f64)], at: Moment) -> Result<(), TrackerError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let items = values.iter().map(|(name, value)| item(&[name], number(*value)));
        open.add(items.collect(), None, at)
    }

    fn log_text(&mut self, name: &str, text: &str, at: Moment) -> Result<(), TrackerError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        open.add(vec![item(&[name], Value::from(text).to_string())], None, at)
    }

    fn log_image(&mut self, name: &str, image: &[u8], at: Moment) -> Result<(), TrackerError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let [width, height] = png::size(name, image)?;
        let hash = format!("{:x}", Sha256::digest(image));
        let mut relative = Path::new("media/images").join(path_of_name(name)?).into_os_string();
        relative.push(format!("_{}_{}.png", at.step, &hash[..20]));
        let path = open.files.join(&relative);
        write_file(&path, image)?;
        let relative = relative.to_string_lossy().into_owned();
        let facts = json!({
            "_type": "image-file", "format": "png", "height": height, "path": relative, "sha256": hash,
            "size": image.len(), "width": width,
        });
        open.add(items_of(name, &facts), Some(FileItem { path: relative }), at)
    }

    fn log_histogram(&mut self, name: &str, values: &[f64], at: Moment) -> Result<(), TrackerError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let Some(histogram) = Histogram::of(values, PARTS) else {
            return Ok(());
        };
        let facts = json!({"_type": "histogram", "bins": histogram.edges(), "values": histogram.counts});
        open.add(items_of(name, &facts), None, at)
    }

    fn finish(&mut self) -> Result<(), TrackerError> {
        let Some(mut open) = self.open.take() else {
            return Ok(());
        };
        open.end_row();
        let runtime = Moment::now(0).wall_time - open.start.wall_time;
        open.write(Kind::Exit(Exit {
            code: 0,
            runtime: runtime as i32,
        }))
    }
}

impl OpenRun {
    fn record(&self, number: i64, kind: Kind) -> Vec<u8> {
        let record = Record {
            number,
            kind: Some(kind),
            info: Some(Info {
                stream: self.id.clone(),
            }),
        };
        record.encode_to_vec()
    }

    fn write(&mut self, kind: Kind) -> Result<(), TrackerError> {
        let record = self.record(self.next, kind);
        self.next += 1;
        self.log.write_at(self.log.end(), &[record])
    }

    /// Takes values of a step, and writes its whole row.
    fn add(&mut self, items: Vec<Item>, file: Option<FileItem>, at: Moment) -> Result<(), TrackerError> {
        if let Some(row) = &self.row
            && at.step < row.step
        {
            if !self.has_warned {
                tracing::warn!(
                    "wandb: values of step {} come after those of step {}: left out, as all that come so",
                    at.step,
                    row.step
                );
                self.has_warned = true;
            }
            return Ok(());
        }
        if self.row.as_ref().is_some_and(|row| row.step < at.step) {
            self.end_row();
        }
        let mut row = self.row.take().unwrap_or_else(|| Row {
            step: at.step,
            place: self.log.end(),
            items: Vec::new(),
            files: Vec::new(),
        });
        let runtime = (at.wall_time - self.start.wall_time).max(0.0);
        let own = [
            item(&["_runtime"], number(runtime)),
            item(&["_step"], at.step.to_string()),
            item(&["_timestamp"], number(at.wall_time)),
        ];
        for item in items.into_iter().chain(own) {
            row.items.retain(|known| known.nested_key != item.nested_key);
            row.items.push(item);
        }
        row.files.extend(file);
        let history = History {
            items: row.items.clone(),
            step: Some(Step { number: at.step as i64 }),
        };
        let kinds = row.kinds(history);
        let numbered = (self.next..).zip(kinds);
        let records = Vec::from_iter(numbered.map(|(number, kind)| self.record(number, kind)));
        let place = row.place;
        self.row = Some(row);
        self.log.write_at(place, &records)
    }

    fn end_row(&mut self) {
        if let Some(row) = self.row.take() {
            self.next += row.records();
        }
    }
}

impl Row {
    /// Returns what is written of it: its files, and its values as the latest and as those of the step.
    fn kinds(&self, history: History) -> Vec<Kind> {
        let files = Kind::Files(Files {
            files: self.files.clone(),
        });
        let summary = Kind::Summary(Updates {
            items: self.items.clone(),
        });
        let files = (!self.files.is_empty()).then_some(files);
        files.into_iter().chain([summary, Kind::History(history)]).collect()
    }

    fn records(&self) -> i64 {
        2 + i64::from(!self.files.is_empty())
    }
}

fn item(name: &[&str], value: String) -> Item {
    Item {
        nested_key: name.iter().map(|part| (*part).into()).collect(),
        value,
        ..Item::default()
    }
}

/// Returns the items of a value that is an object.
fn items_of(name: &str, facts: &Value) -> Vec<Item> {
    let facts = facts.as_object().into_iter().flatten();
    facts
        .map(|(key, value)| item(&[name, key], value.to_string()))
        .collect()
}

fn number(value: f64) -> String {
    match json_lines::number(value) {
        Value::String(name) => name,
        finite => finite.to_string(),
    }
}

/// Makes the folder of a run that no other has; returns the run's identity too.
fn new_folder(store: &Path, project: &str, at: Moment) -> Result<(String, PathBuf), TrackerError> {
    fs::create_dir_all(store).map_err(TrackerError::at(store))?;
    let mut attempt = 0;
    loop {
        let seed = format!("{project} {} {} {attempt}", std::process::id(), at.wall_time);
        // Eight letters and digits, as the client chooses them.
        let hash = blake3::hash(seed.as_bytes());
        let id = hash.as_bytes()[..8].iter().map(|byte| {
            let digit = char::from_digit(u32::from(*byte) % 36, 36);
            digit.expect("a remainder of 36 is a digit of base 36")
        });
        let id = String::from_iter(id);
        let folder = store.join(format!("offline-run-{}-{id}", Date::of(at.wall_time as u64).compact()));
        match fs::create_dir(&folder) {
            Ok(()) => return Ok((id, folder)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => attempt += 1,
            Err(source) => return Err(TrackerError::File { path: folder, source }),
        }
    }
}
