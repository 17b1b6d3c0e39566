//! Where the time of a rank goes, as a trace that Chrome (`about:tracing`) and Perfetto show.
//!
//! Everything that is worth seeing is a span of `tracing`: the forward and backward of units, the backward as a whole,
//! reductions and gathers, waiting for them, optimizer steps, waiting for data. [`ChromeTrace`] is a layer that writes
//! spans down; a program that has a subscriber of its own adds it there, for others `profile` sets one.
//!
//! A file holds one event a line, in the format's array form, which may end anywhere: a run that is killed leaves a trace
//! that can be looked at. A span with a field `what` is shown with it behind its name; what such spans have in common is
//! their category, the name alone.

use crate::{Accelerator, Error, Result};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::subscriber::set_global_default;
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, Registry};

/// A layer that writes every span to a file while one is open; clones write to the same.
///
/// ```
/// use sconce_core::ChromeTrace;
/// use tracing_subscriber::layer::SubscriberExt as _;
///
/// let folder = tempfile::tempdir()?;
/// let trace = ChromeTrace::default();
/// let subscriber = tracing_subscriber::registry().with(trace.clone());
/// let path = trace.open(folder.path(), 0)?;
/// tracing::subscriber::with_default(subscriber, || tracing::info_span!("evaluation").in_scope(|| ()));
/// trace.close()?;
/// assert!(std::fs::read_to_string(path)?.contains("evaluation"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ChromeTrace {
    open: Arc<Mutex<Option<OpenFile>>>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    rank: usize,
    writer: BufWriter<File>,
    start: Instant,
    /// Threads that have been named in the file.
    named: Vec<u64>,
    /// What went wrong first; told at the end.
    failure: Option<std::io::Error>,
}

/// A trace being taken; it ends when this is dropped.
#[derive(Debug)]
#[must_use = "the trace ends when it is dropped"]
pub struct Profile {
    trace: ChromeTrace,
    path: PathBuf,
}

impl<'a> dyn Accelerator + 'a {
    /// Writes where this rank's time goes to `folder`/trace-rank-N.json, until the returned value is dropped.
    ///
    /// # Errors
    /// [`Error::Profile`] when the file cannot be made, when a trace is being taken already, and when the program has a
    /// `tracing` subscriber of its own: it then adds a [`ChromeTrace`] to that one.
    pub fn profile(&self, folder: impl AsRef<Path>) -> Result<Profile> {
        static INSTALLED: OnceLock<Option<ChromeTrace>> = OnceLock::new();
        let installed = INSTALLED.get_or_init(|| {
            let trace = ChromeTrace::default();
            set_global_default(Registry::default().with(trace.clone()))
                .ok()
                .map(|()| trace)
        });
        let Some(trace) = installed else {
            return Err(Error::Profile {
                path: folder.as_ref().into(),
                reason:
                    "this program has a tracing subscriber already; add a sconce_core::ChromeTrace to it and open that"
                        .into(),
            });
        };
        let path = trace.open(folder.as_ref(), self.world().rank)?;
        let trace = trace.clone();
        Ok(Profile { trace, path })
    }
}

impl Profile {
    /// Returns the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// [`Error::Profile`] when it could not be written in full.
    pub fn finish(self) -> Result<()> {
        self.trace.close()
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        if let Err(error) = self.trace.close() {
            tracing::warn!("{error}");
        }
    }
}

impl ChromeTrace {
    /// Begins a file in `folder`, which is made if need be; returns its path.
    ///
    /// # Errors
    /// [`Error::Profile`] when it cannot be made, or another one is open.
    pub fn open(&self, folder: &Path, rank: usize) -> Result<PathBuf> {
        let path = folder.join(format!("trace-rank-{rank}.json"));
        let refuse = |reason: String| Error::Profile {
            path: path.clone(),
            reason,
        };
        let mut open = self.lock();
        if let Some(open) = &*open {
            return Err(refuse(format!(
                "a trace is being taken already, to {}",
                open.path.display()
            )));
        }
        let made = std::fs::create_dir_all(folder).and_then(|()| File::create(&path));
        let mut file = OpenFile {
            writer: BufWriter::new(made.map_err(|error| refuse(error.to_string()))?),
            path: path.clone(),
            rank,
            start: Instant::now(),
            named: Vec::new(),
            failure: None,
        };
        file.write_text("[");
        file.write(&json!({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": format!("rank {rank}")}}));
        *open = Some(file);
        Ok(path)
    }

    /// Ends the file; does nothing when none is open.
    ///
    /// # Errors
    /// [`Error::Profile`] when it could not be written in full.
    pub fn close(&self) -> Result<()> {
        let Some(mut open) = self.lock().take() else {
            return Ok(());
        };
        // What comes after a comma may be missing, but not nothing.
        open.write_text("\n{\"name\": \"end\", \"ph\": \"M\", \"pid\": 0, \"args\": {}}]\n");
        let flushed = open.writer.flush();
        match open.failure.take().map_or(flushed, Err) {
            Ok(()) => Ok(()),
            Err(error) => Err(Error::Profile {
                path: open.path,
                reason: error.to_string(),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<OpenFile>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenFile {
    fn write(&mut self, event: &Value) {
        self.write_text(&format!("\n{event},"));
    }

    fn write_text(&mut self, text: &str) {
        if let Err(error) = self.writer.write_all(text.as_bytes()) {
            self.failure.get_or_insert(error);
        }
    }

    fn write_span(&mut self, span: &Recorded, name: &'static str) {
        let Some(begin) = span.begin.checked_duration_since(self.start) else {
            // It began before the trace did.
            return;
        };
        let thread = number_of_thread();
        if !self.named.contains(&thread) {
            self.named.push(thread);
            let name = std::thread::current().name().unwrap_or("thread").to_owned();
            let args = json!({ "name": name });
            self.write(&json!({"name": "thread_name", "ph": "M", "pid": self.rank, "tid": thread, "args": args}));
        }
        let mut args = span.fields.0.clone();
        let full_name = match args.remove("what") {
            Some(Value::String(what)) => format!("{name} {what}"),
            Some(what) => format!("{name} {what}"),
            None => name.to_owned(),
        };
        args.entry("target").or_insert_with(|| span.target.into());
        let micros = |time: std::time::Duration| time.as_nanos() as f64 / 1e3;
        self.write(&json!({
            "name": full_name, "cat": name, "ph": "X", "pid": self.rank, "tid": thread,
            "ts": micros(begin), "dur": micros(span.begin.elapsed()), "args": args,
        }));
    }
}

/// What is kept of a span while it is open.
struct Recorded {
    begin: Instant,
    target: &'static str,
    fields: Fields,
}

#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().into(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().into(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().into(), value.into());
    }
}

impl<S: tracing::Subscriber + for<'l> LookupSpan<'l>> Layer<S> for ChromeTrace {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if self.lock().is_none() {
            return;
        }
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            let target = attributes.metadata().target();
            let begin = Instant::now();
            span.extensions_mut().insert(Recorded { begin, target, fields });
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        if let Some(recorded) = span.extensions().get::<Recorded>()
            && let Some(open) = &mut *self.lock()
        {
            open.write_span(recorded, span.name());
        }
    }
}

/// Returns a small number that is this thread's alone.
fn number_of_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Relaxed);
    }
    NUMBER.with(|number| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_of_one_name_have_one_category_whatever_they_were_for() {
        let folder = tempfile::tempdir().unwrap();
        let trace = ChromeTrace::default();
        let path = trace.open(folder.path(), 0).unwrap();
        tracing::subscriber::with_default(Registry::default().with(trace.clone()), || {
            tracing::info_span!("read", what = 0u64, bytes = 3u64).in_scope(|| ());
            tracing::info_span!("read", what = "a file").in_scope(|| ());
            tracing::info_span!("read", target = "of the user").in_scope(|| ());
        });
        trace.close().unwrap();
        let events: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let spans = events.iter().filter(|event| event["ph"] == "X");
        let told = spans.map(|span| (&span["name"], &span["cat"], &span["args"]));
        let here = module_path!();
        assert_eq!(
            Vec::from_iter(told),
            [
                (&json!("read 0"), &json!("read"), &json!({"bytes": 3, "target": here})),
                (&json!("read a file"), &json!("read"), &json!({ "target": here })),
                (&json!("read"), &json!("read"), &json!({"target": "of the user"})),
            ]
        );
    }
}
