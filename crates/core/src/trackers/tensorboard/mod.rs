//! Event files of TensorBoard: a few messages of protobuf in the framing of TFRecord.

mod event;
mod record;

use super::histogram::Histogram;
use super::{Moment, Run, Tracker, TrackerError, png};
use crate::host_name::host_name;
use event::Event;
use prost::Message as _;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;

/// Writes `PROJECT/events.out.tfevents.*`, a file for every start: `tensorboard --logdir FOLDER` shows them.
///
/// Scalars are rounded to f32, as in all event files. Hyper-parameters are a table of text, `hparams/text_summary`.
#[derive(Debug)]
pub struct TensorBoard {
    folder: PathBuf,
    open: Option<(PathBuf, File)>,
}

/// How many bars a histogram has.
const BARS: usize = 30;

impl TensorBoard {
    /// Makes a tracker that writes below `folder`.
    pub fn boxed(folder: impl Into<PathBuf>) -> Box<dyn Tracker> {
        Box::new(Self {
            folder: folder.into(),
            open: None,
        })
    }

    /// Writes one event, in one call of the system: it survives the end of this process.
    fn write(&mut self, event: &Event) -> Result<(), TrackerError> {
        let Some((path, file)) = &mut self.open else {
            return Ok(());
        };
        let written = file.write_all(&record::framed(&event.encode_to_vec()));
        written.map_err(TrackerError::at(path))
    }
}

impl Tracker for TensorBoard {
    fn name(&self) -> &str {
        "tensorboard"
    }

    fn start(&mut self, run: &Run) -> Result<(), TrackerError> {
        let folder = self.folder.join(run.project());
        fs::create_dir_all(&folder).map_err(TrackerError::at(&folder))?;
        let at = Moment::now(0);
        self.open = Some(create(&folder, at)?);
        self.write(&event::first(at))?;
        let parameters = run.hyper_parameters();
        if parameters.is_empty() {
            return Ok(());
        }
        let mut table = String::from("| name | value |\n| --- | --- |\n");
        for (name, value) in parameters {
            let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
            table += &format!("| {} | {} |\n", cell(&name), cell(&value));
        }
        self.write(&event::of(at, vec![event::text("hparams/text_summary", &table)]))
    }

    fn log(&mut self, values: &[(&str, f64)], at: Moment) -> Result<(), TrackerError> {
        let values = values.iter().map(|(name, value)| event::scalar(name, *value));
        self.write(&event::of(at, values.collect()))
    }

    fn log_text(&mut self, name: &str, text: &str, at: Moment) -> Result<(), TrackerError> {
        self.write(&event::of(at, vec![event::text(name, text)]))
    }

    fn log_image(&mut self, name: &str, image: &[u8], at: Moment) -> Result<(), TrackerError> {
        let size = png::size(name, image)?;
        self.write(&event::of(at, vec![event::image(name, size, image)]))
    }

    fn log_histogram(&mut self, name: &str, values: &[f64], at: Moment) -> Result<(), TrackerError> {
        let Some(histogram) = Histogram::of(values, BARS) else {
            return Ok(());
        };
        self.write(&event::of(at, vec![event::histogram(name, histogram)]))
    }
}

/// Makes a file that no other process has, under a name that TensorBoard looks for.
fn create(folder: &std::path::Path, at: Moment) -> Result<(PathBuf, File), TrackerError> {
    let host = match host_name() {
        name if name.is_empty() => "localhost".into(),
        name => name,
    };
    let mut number = 0;
    loop {
        let (seconds, process) = (at.wall_time as u64, std::process::id());
        let path = folder.join(format!("events.out.tfevents.{seconds:010}.{host}.{process}.{number}"));
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            Err(source) => return Err(TrackerError::File { path, source }),
        }
    }
}
