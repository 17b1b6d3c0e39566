//! The SQLite store of Trackio, which `TRACKIO_DIR=FOLDER/trackio trackio show` shows.

use super::append_file::write_file;
use super::calendar::Date;
use super::histogram::Histogram;
use super::name_path::path_of_name;
use super::{Moment, Run, Tracker, TrackerError, json_lines, png};
use rusqlite::{Connection, params};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Writes a run into `trackio/PROJECT.db`, with images below `trackio/media`, as Trackio 0.43 does. Every start is a new run.
///
/// Of Trackio's tables only those are made that a run needs, in the layout from which it brings a store up to date itself; a
/// store that it has made is added to. The file's name is the project's, without what is no letter, digit, `-` or `_`.
#[derive(Debug)]
pub struct Trackio {
    folder: PathBuf,
    open: Option<OpenRun>,
}

#[derive(Debug)]
struct OpenRun {
    store: Connection,
    path: PathBuf,
    id: String,
    name: String,
    /// The project's name on disk.
    project: String,
}

/// How many parts a histogram has, as Trackio makes it.
const PARTS: usize = 64;
/// How long another program may keep the store to itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// Source: `init_db` in Trackio's `sqlite_storage.py`.
const TABLES: &str = "
CREATE TABLE IF NOT EXISTS metrics (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL, run_name TEXT NOT NULL,
    step INTEGER NOT NULL, metrics TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS configs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, run_name TEXT NOT NULL, config TEXT NOT NULL,
    created_at TEXT NOT NULL, UNIQUE(run_id)
);
CREATE TABLE IF NOT EXISTS system_metrics (
    id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, timestamp TEXT NOT NULL, run_name TEXT NOT NULL,
    metrics TEXT NOT NULL
);
";

impl Trackio {
    /// Makes a tracker that writes into `folder`/trackio.
    pub fn boxed(folder: impl AsRef<Path>) -> Box<dyn Tracker> {
        Box::new(Self {
            folder: folder.as_ref().join("trackio"),
            open: None,
        })
    }

    /// Adds one row of values.
    fn add(&self, values: Map<String, Value>, at: Moment) -> Result<(), TrackerError> {
        let Some(run) = &self.open else { return Ok(()) };
        // Bytes, as Trackio writes them.
        let values = Value::from(values).to_string().into_bytes();
        let added = run.store.execute(
            "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?, ?)",
            params![run.id, time(at), run.name, at.step as i64, values],
        );
        added.map(drop).map_err(in_store(&run.path))
    }
}

impl Tracker for Trackio {
    fn name(&self) -> &str {
        "trackio"
    }

    fn start(&mut self, run: &Run) -> Result<(), TrackerError> {
        let at = Moment::now(0);
        let project = String::from_iter(
            run.project()
                .chars()
                .filter(|character| character.is_alphanumeric() || "-_".contains(*character)),
        );
        let project = if project.is_empty() { "default".into() } else { project };
        fs::create_dir_all(&self.folder).map_err(TrackerError::at(&self.folder))?;
        let path = self.folder.join(format!("{project}.db"));
        let store = open(&path).map_err(in_store(&path))?;
        let seed = format!("{} {} {}", run.project(), std::process::id(), at.wall_time);
        let hash = blake3::hash(seed.as_bytes()).to_hex();
        let date = Date::of(at.wall_time as u64);
        let open = OpenRun {
            store,
            path,
            id: hash[..32].into(),
            name: format!("{}-{}-{}", run.project(), date.compact(), &hash[..4]),
            project,
        };
        let mut config = run.config().clone();
        config.insert("_Created".into(), time(at).into());
        open.store
            .execute(
                "INSERT INTO configs (run_id, run_name, config, created_at) VALUES (?, ?, ?, ?)",
                params![
                    open.id,
                    open.name,
                    Value::from(config).to_string().into_bytes(),
                    time(at)
                ],
            )
            .map_err(in_store(&open.path))?;
        self.open = Some(open);
        Ok(())
    }

    fn log(&mut self, values: &[(&str, f64)], at: Moment) -> Result<(), TrackerError> {
        let values = values.iter();
        self.add(
            values
                .map(|(name, value)| ((*name).into(), json_lines::number(*value)))
                .collect(),
            at,
        )
    }

    fn log_text(&mut self, name: &str, text: &str, at: Moment) -> Result<(), TrackerError> {
        self.add(Map::from_iter([(name.into(), text.into())]), at)
    }

    fn log_image(&mut self, name: &str, image: &[u8], at: Moment) -> Result<(), TrackerError> {
        png::size(name, image)?;
        let Some(run) = &self.open else { return Ok(()) };
        let mut relative = PathBuf::from(&run.project)
            .join(&run.name)
            .join(at.step.to_string())
            .join(path_of_name(name)?)
            .into_os_string();
        relative.push(".png");
        let path = self.folder.join("media").join(&relative);
        write_file(&path, image)?;
        let facts = json!({"_type": "trackio.image", "file_path": relative.to_string_lossy(), "caption": null});
        self.add(Map::from_iter([(name.into(), facts)]), at)
    }

    fn log_histogram(&mut self, name: &str, values: &[f64], at: Moment) -> Result<(), TrackerError> {
        let Some(histogram) = Histogram::of(values, PARTS) else {
            return Ok(());
        };
        let facts = json!({"_type": "trackio.histogram", "bins": histogram.edges(), "values": histogram.counts});
        self.add(Map::from_iter([(name.into(), facts)]), at)
    }

    fn finish(&mut self) -> Result<(), TrackerError> {
        let Some(run) = self.open.take() else { return Ok(()) };
        run.store.close().map_err(|(_, error)| in_store(&run.path)(error))
    }
}

/// Opens a store, or makes one.
fn open(path: &Path) -> rusqlite::Result<Connection> {
    let store = Connection::open(path)?;
    store.busy_timeout(PATIENCE)?;
    // So that Trackio can read while the run goes on.
    store.pragma_update(None, "journal_mode", "WAL")?;
    // Handed to the system at every call, as by the other trackers, and not waited for until it is on the disk.
    store.pragma_update(None, "synchronous", "NORMAL")?;
    store.execute_batch(TABLES)?;
    Ok(store)
}

/// Returns a function that says in which store an error happened.
fn in_store(path: &Path) -> impl FnOnce(rusqlite::Error) -> TrackerError {
    move |error| TrackerError::Other(format!("{}: {error}", path.display()).into())
}

/// Returns a date as Trackio has it, in UTC and with microseconds.
fn time(at: Moment) -> String {
    let date = Date::of(at.wall_time as u64).iso();
    let microseconds = (at.wall_time.fract() * 1e6) as u64;
    format!("{date}.{microseconds:06}+00:00")
}
