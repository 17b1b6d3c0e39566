//! Carries the ranks' output to the console, one thread per pipe, and keeps the last lines of each stderr.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::{io, thread};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::console::{Console, Stream};
use super::line_splitter::LineSplitter;
use super::log_files::StreamFile;
use super::rank_tags::{TaggedLines, Writer};

/// How many of a rank's last lines on stderr are kept.
const KEPT_LINES: usize = 20;
/// How many bytes of each of them are kept.
const KEPT_BYTES: usize = 1000;
/// How much is still read from one stream after the ranks have ended: what a pipe holds at most by default, and more.
/// A process that escaped its rank's group may keep writing; it must not keep the launcher.
const DRAINED_BYTES: usize = 4 << 20;

/// The last lines of one rank's stderr.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct LastLines(VecDeque<String>);

impl LastLines {
    /// The lines, oldest first.
    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Keeps `line`. Redrawn states of a progress bar are not lines.
    pub(super) fn keep(&mut self, line: &[u8]) {
        if line.ends_with(b"\r") {
            return;
        }
        let text = String::from_utf8_lossy(&line[..line.len().min(KEPT_BYTES)]);
        if is_stack_frame(&text) {
            return;
        }
        if self.0.len() == KEPT_LINES {
            self.0.pop_front();
        }
        self.0.push_back(text.trim_end().to_owned());
    }
}

/// Says whether a line belongs to a backtrace of Rust's: `  12: function` or `      at file:1:2`. The message counts, and
/// frames would push it out.
fn is_stack_frame(line: &str) -> bool {
    let indented = line.starts_with("  ");
    let line = line.trim_start();
    let number = line.split(": ").next().unwrap_or_default();
    indented && (line.starts_with("at ") || !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What is known of the ranks' output once all of it has been carried.
#[derive(Debug, Default)]
pub(super) struct Carried {
    /// The last lines of each rank's stderr; those of nobody are `mpirun`'s own.
    pub(super) last_lines: BTreeMap<Writer, LastLines>,
    /// The stream or file that could not be written to, and why, unless only its reader had left.
    pub(super) failure: Option<(String, io::Error)>,
}

/// The first file that could not be written to, and why.
type FileFailure = Arc<Mutex<Option<(String, io::Error)>>>;

/// The threads that carry the ranks' output.
#[derive(Debug)]
pub(super) struct Output {
    console: Arc<Console>,
    stdout: Vec<JoinHandle<()>>,
    stderr: Vec<JoinHandle<BTreeMap<Writer, LastLines>>>,
    /// Closed by `end_writer`: no more output is to be waited for.
    end: Arc<PipeReader>,
    end_writer: PipeWriter,
    file_failure: FileFailure,
}

impl Output {
    /// Prepares to carry output to `console`.
    ///
    /// # Errors
    /// When the process can open no more files.
    pub(super) fn new(console: Console) -> io::Result<Self> {
        let (end, end_writer) = io::pipe()?;
        Ok(Self {
            console: Arc::new(console),
            stdout: Vec::new(),
            stderr: Vec::new(),
            end: Arc::new(end),
            end_writer,
            file_failure: FileFailure::default(),
        })
    }

    /// Carries the output of `child`, whose stdout and stderr are pipes, as that of `rank`, and into its files.
    ///
    /// # Errors
    /// When the system can start no more threads.
    pub(super) fn carry(&mut self, rank: usize, child: &mut Child, files: [StreamFile; 2]) -> io::Result<()> {
        self.carry_lines(|| Lines::OfRank(rank, LineSplitter::default()), child, files)
    }

    /// Carries the output of `child`, an `mpirun` whose stdout and stderr are pipes, as that of the ranks that its tags name.
    ///
    /// # Errors
    /// When the system can start no more threads.
    pub(super) fn carry_tagged(&mut self, child: &mut Child) -> io::Result<()> {
        self.carry_lines(|| Lines::Tagged(TaggedLines::default()), child, Default::default())
    }

    fn carry_lines(&mut self, lines: impl Fn() -> Lines, child: &mut Child, files: [StreamFile; 2]) -> io::Result<()> {
        let [of_stdout, of_stderr] = files;
        let stdout = child.stdout.take().expect("a carried process's stdout is a pipe");
        let carrier = self.carrier(lines(), Stream::Stdout, stdout.into(), of_stdout);
        self.stdout
            .push(thread::Builder::new().spawn(move || carrier.run(|_, _| {}))?);

        let stderr = child.stderr.take().expect("a carried process's stderr is a pipe");
        let carrier = self.carrier(lines(), Stream::Stderr, stderr.into(), of_stderr);
        self.stderr.push(thread::Builder::new().spawn(move || {
            let mut last_lines = BTreeMap::<Writer, LastLines>::new();
            carrier.run(|writer, line| last_lines.entry(writer).or_default().keep(line));
            last_lines
        })?);
        Ok(())
    }

    /// Passes on what the ended ranks have left in their pipes.
    pub(super) fn finish(self) -> Carried {
        drop(self.end_writer);
        for thread in self.stdout {
            // A carrier that panicked has said so; its rank's report is better made without it than not at all.
            let _ = thread.join();
        }
        let last_lines = self
            .stderr
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_default());
        Carried {
            last_lines: last_lines.collect(),
            failure: {
                let of_console = self.console.take_failure();
                let of_console = of_console.map(|(stream, reason)| (stream.to_string(), reason));
                let mut of_file = self.file_failure.lock().unwrap_or_else(PoisonError::into_inner);
                of_console.or_else(|| of_file.take())
            },
        }
    }

    fn carrier(&self, lines: Lines, stream: Stream, pipe: OwnedFd, file: StreamFile) -> Carrier {
        Carrier {
            pipe: pipe.into(),
            lines,
            console: Arc::clone(&self.console),
            stream,
            file,
            file_failure: Arc::clone(&self.file_failure),
            end: Arc::clone(&self.end),
        }
    }
}

/// Whose lines come through a pipe.
#[derive(Debug)]
enum Lines {
    OfRank(usize, LineSplitter),
    Tagged(TaggedLines),
}

impl Lines {
    /// Adds `bytes` and calls `each` with every line that they complete, its line end included.
    fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(Writer, &[u8])) {
        match self {
            Self::OfRank(rank, splitter) => splitter.feed(bytes, |line| each(Some(*rank), line)),
            Self::Tagged(tagged) => tagged.feed(bytes, each),
        }
    }

    /// Calls `each` with what is left.
    fn finish(&mut self, mut each: impl FnMut(Writer, &[u8])) {
        match self {
            Self::OfRank(rank, splitter) => splitter.finish(|line| each(Some(*rank), line)),
            Self::Tagged(tagged) => tagged.finish(each),
        }
    }
}

/// Carries one stream of one process.
#[derive(Debug)]
struct Carrier {
    pipe: File,
    lines: Lines,
    console: Arc<Console>,
    stream: Stream,
    file: StreamFile,
    file_failure: FileFailure,
    end: Arc<PipeReader>,
}

impl Carrier {
    /// Carries lines, and shows each to `also` with its writer, until the process closes the stream or all ranks have ended.
    ///
    /// When the console's reader has gone, this stops and so closes the rank's pipe: the rank learns at its next write,
    /// as it would if it wrote to the console itself.
    fn run(mut self, mut also: impl FnMut(Writer, &[u8])) {
        let mut chunk = vec![0; 64 << 10];
        let mut batch = Vec::new();
        let mut left_to_drain = DRAINED_BYTES;
        loop {
            let (readable, ended) = self.wait();
            if ended && (!readable || left_to_drain == 0) {
                break;
            }
            let length = match self.pipe.read(&mut chunk) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            if ended {
                left_to_drain = left_to_drain.saturating_sub(length);
            }
            self.lines.feed(&chunk[..length], |writer, line| {
                if !self.file.only {
                    add_line(&mut batch, &prefix(&self.console, self.stream, writer), line);
                }
                also(writer, line);
            });
            write_to_file(&mut self.file, &self.file_failure, &chunk[..length]);
            if self.console.write(self.stream, &batch).is_err() {
                return;
            }
            batch.clear();
        }
        self.lines.finish(|writer, line| {
            if !self.file.only {
                add_line(&mut batch, &prefix(&self.console, self.stream, writer), line);
            }
            also(writer, line);
        });
        // Nothing is left to tell the rank: its stream has ended.
        let _ = self.console.write(self.stream, &batch);
    }

    /// Waits until there is something to read or all ranks have ended: (something to read, all ended).
    fn wait(&self) -> (bool, bool) {
        let mut waited = [
            PollFd::new(&self.pipe, PollFlags::IN),
            PollFd::new(&*self.end, PollFlags::IN),
        ];
        loop {
            match poll(&mut waited, None) {
                Ok(_) => return (!waited[0].revents().is_empty(), !waited[1].revents().is_empty()),
                Err(Errno::INTR) => {}
                // Reading tells what is wrong.
                Err(_) => return (true, false),
            }
        }
    }
}

/// Writes what a rank wrote, as it wrote it. A file that cannot be written to is given up, and told of at the end.
fn write_to_file(stream: &mut StreamFile, failure: &FileFailure, bytes: &[u8]) {
    if let Some((path, file)) = &mut stream.file
        && let Err(reason) = file.write_all(bytes)
    {
        let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert((path.display().to_string(), reason));
        stream.file = None;
    }
}

/// The text before a line of `writer`.
fn prefix(console: &Console, stream: Stream, writer: Writer) -> Vec<u8> {
    writer.map_or_else(Vec::new, |rank| console.prefix(rank, stream))
}

/// Adds `line` to `batch` with its prefix, and a line end where the rank has not written one.
fn add_line(batch: &mut Vec<u8>, prefix: &[u8], line: &[u8]) {
    batch.extend_from_slice(prefix);
    batch.extend_from_slice(line);
    if !line.ends_with(b"\n") && !line.ends_with(b"\r") {
        batch.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_twenty_lines_are_kept_and_progress_bars_and_stack_frames_are_not() {
        let mut last_lines = LastLines::default();
        for number in 0..30 {
            last_lines.keep(format!("line {number}\n").as_bytes());
            last_lines.keep(b"50%\r");
            last_lines.keep(b"  12: core::panicking::panic_fmt\n");
            last_lines.keep(b"             at ./tests/core/main.rs:59:100\n");
        }
        let expected: Vec<_> = (10..30).map(|number| format!("line {number}")).collect();
        assert_eq!(last_lines.iter().collect::<Vec<_>>(), expected);
    }
}
