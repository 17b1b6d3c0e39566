//! `--log_dir`, `--tee` and `--redirects`: what ranks write, in files; and the files in which ranks leave their error.
//!
//! A run has a folder of its own in `--log_dir`, with a folder for each round and rank:
//! `RUN/attempt_0/3/{stdout.log,stderr.log,error.json}`. Without `--log_dir` only the last of them exists, in a temporary
//! folder that goes with the launcher.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use tempfile::TempDir;

use super::place::Place;
use crate::command_error::CommandError;

/// Flags about files for the ranks' output, with torchrun's values.
#[derive(Debug, Args)]
#[command(next_help_heading = "Logs")]
pub(super) struct LogArguments {
    /// Folder for the files of --tee and --redirects, and of the ranks' errors; every run gets a folder of its own there
    #[arg(long = "log_dir", alias = "log-dir", value_name = "FOLDER")]
    pub(super) log_dir: Option<PathBuf>,

    /// Streams that go to files besides: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, such as 0:1,1:3
    #[arg(long, short = 't', value_name = "STREAMS")]
    pub(super) tee: Option<StreamsOfRanks>,

    /// Streams that go to files only, likewise
    #[arg(long, short = 'r', value_name = "STREAMS")]
    pub(super) redirects: Option<StreamsOfRanks>,
}

/// Streams of a rank.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Streams {
    pub(super) stdout: bool,
    pub(super) stderr: bool,
}

/// Streams by local rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StreamsOfRanks {
    All(Streams),
    Listed(BTreeMap<usize, Streams>),
}

impl StreamsOfRanks {
    fn of(&self, local_rank: usize) -> Streams {
        match self {
            Self::All(streams) => *streams,
            Self::Listed(by_rank) => by_rank.get(&local_rank).copied().unwrap_or_default(),
        }
    }

    fn is_any(&self) -> bool {
        let is_one = |streams: &Streams| streams.stdout || streams.stderr;
        match self {
            Self::All(streams) => is_one(streams),
            Self::Listed(by_rank) => by_rank.values().any(is_one),
        }
    }
}

impl FromStr for Streams {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (stdout, stderr) = match text {
            "0" => (false, false),
            "1" => (true, false),
            "2" => (false, true),
            "3" => (true, true),
            _ => return Err(()),
        };
        Ok(Self { stdout, stderr })
    }
}

impl FromStr for StreamsOfRanks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |()| {
            "0 (none), 1 (stdout), 2 (stderr) or 3 (both) is needed, for all ranks or by local rank such as 0:1,1:3"
                .to_owned()
        };
        if !text.contains(':') {
            return text.parse().map(Self::All).map_err(wrong);
        }
        let mut by_rank = BTreeMap::new();
        for pair in text.split(',') {
            let (rank, streams) = pair.split_once(':').ok_or_else(|| wrong(()))?;
            let rank = rank.parse().map_err(|_| wrong(()))?;
            if by_rank.insert(rank, streams.parse().map_err(wrong)?).is_some() {
                return Err(format!("local rank {rank} is there twice"));
            }
        }
        Ok(Self::Listed(by_rank))
    }
}

impl LogArguments {
    /// The flag that needs a launcher which starts the ranks itself, if one is given.
    pub(super) fn any(&self) -> Option<&'static str> {
        let flags = [
            ("--log_dir", self.log_dir.is_some()),
            ("--tee", self.tee.is_some()),
            ("--redirects", self.redirects.is_some()),
        ];
        flags.into_iter().find_map(|(flag, given)| given.then_some(flag))
    }
}

/// Where the files of a run's ranks lie.
#[derive(Debug)]
pub(super) struct LogFiles {
    folder: Folder,
    tee: Option<StreamsOfRanks>,
    redirects: Option<StreamsOfRanks>,
}

#[derive(Debug)]
enum Folder {
    OfUser(PathBuf),
    Temporary(TempDir),
}

/// The files of one rank in one round.
#[derive(Debug)]
pub(super) struct RankFiles {
    pub(super) stdout: StreamFile,
    pub(super) stderr: StreamFile,
    /// What the rank finds in `TORCHELASTIC_ERROR_FILE`.
    pub(super) error: PathBuf,
}

/// Where one stream of one rank goes.
#[derive(Debug, Default)]
pub(super) struct StreamFile {
    pub(super) file: Option<(PathBuf, File)>,
    /// Whether it goes to the file only.
    pub(super) only: bool,
}

impl LogFiles {
    /// Checks the flags and that there is, or can be, a folder.
    ///
    /// # Errors
    /// When files are asked for without a folder, or it cannot be made.
    pub(super) fn new(arguments: &LogArguments) -> Result<Self, CommandError> {
        let LogArguments {
            log_dir,
            tee,
            redirects,
        } = arguments;
        let folder = match log_dir {
            Some(folder) => {
                fs::create_dir_all(folder).map_err(|reason| {
                    CommandError::usage(format!("--log_dir {}: {reason}", folder.display()))
                        .hint("name a folder that can be made and written to")
                })?;
                Folder::OfUser(folder.clone())
            }
            None => {
                let asked = [("--tee", tee), ("--redirects", redirects)];
                let asked = asked
                    .into_iter()
                    .find(|(_, streams)| streams.as_ref().is_some_and(StreamsOfRanks::is_any));
                if let Some((flag, _)) = asked {
                    let error = CommandError::usage(format!("{flag} needs --log_dir"));
                    return Err(error.hint("name the folder in which the files shall lie"));
                }
                let made = tempfile::Builder::new().prefix("sconce-").tempdir();
                Folder::Temporary(made.map_err(|reason| {
                    CommandError::failure(format!(
                        "cannot make a temporary folder for the ranks' errors: {reason}"
                    ))
                    .hint("name one with room: --log_dir FOLDER, or TMPDIR")
                })?)
            }
        };
        Ok(Self {
            folder,
            tee: tee.clone(),
            redirects: redirects.clone(),
        })
    }

    /// Whether any stream goes to a file: then the launcher must carry it.
    pub(super) fn has_streams(&self) -> bool {
        let both = [&self.tee, &self.redirects];
        both.into_iter().flatten().any(StreamsOfRanks::is_any)
    }

    /// Makes the files of one rank.
    ///
    /// # Errors
    /// The system's, with the file's name.
    pub(super) fn of_rank(&self, place: &Place, local_rank: usize) -> io::Result<RankFiles> {
        let rank = place.rank(local_rank).to_string();
        let folder = match &self.folder {
            Folder::OfUser(folder) => folder.join(file_name(&place.run_id)),
            Folder::Temporary(folder) => folder.path().to_owned(),
        };
        let folder = folder.join(format!("attempt_{}", place.round)).join(rank);
        fs::create_dir_all(&folder).map_err(|reason| named(&folder, &reason))?;
        let streams = |of: &Option<StreamsOfRanks>| of.as_ref().map(|of| of.of(local_rank)).unwrap_or_default();
        let (tee, redirects) = (streams(&self.tee), streams(&self.redirects));
        let file = |name: &str, tee: bool, only: bool| {
            let path = folder.join(name);
            let file = (tee || only).then(|| File::create(&path).map_err(|reason| named(&path, &reason)));
            let file = file.transpose()?.map(|file| (path, file));
            io::Result::Ok(StreamFile { file, only })
        };
        Ok(RankFiles {
            stdout: file("stdout.log", tee.stdout, redirects.stdout)?,
            stderr: file("stderr.log", tee.stderr, redirects.stderr)?,
            error: folder.join("error.json"),
        })
    }
}

/// A run's name as the name of one folder, whatever somebody calls it.
fn file_name(run_id: &str) -> String {
    let name = run_id.replace(|character: char| character == '/' || character.is_control(), "_");
    match name.trim_start_matches('.') {
        "" => "run".to_owned(),
        name => name.to_owned(),
    }
}

fn named(path: &Path, reason: &io::Error) -> io::Error {
    io::Error::new(reason.kind(), format!("{}: {reason}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_named_as_torchrun_names_them() {
        let of = |text: &str, rank: usize| {
            let streams = text.parse::<StreamsOfRanks>().unwrap().of(rank);
            (streams.stdout, streams.stderr)
        };
        assert_eq!([of("0", 0), of("1", 1)], [(false, false), (true, false)]);
        assert_eq!([of("2", 0), of("3", 9)], [(false, true), (true, true)]);
        let listed = "0:1,12:3,2:0";
        assert_eq!([of(listed, 0), of(listed, 12)], [(true, false), (true, true)]);
        assert_eq!([of(listed, 1), of(listed, 2)], [(false, false); 2]);
        for wrong in ["", "4", "-1", "0:4", "0:", ":1", "1,2", "0:1,1", "0:1,0:2", "a"] {
            assert!(wrong.parse::<StreamsOfRanks>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_runs_name_is_one_folder() {
        assert_eq!(file_name("job 7"), "job 7");
        assert_eq!(file_name("../a/b"), "_a_b");
        assert_eq!(file_name(".."), "run");
    }
}
