//! A terminal that a test reads and types on: a pseudo-terminal with a program on its other side.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

pub(crate) const DOWN: &str = "\x1b[B";
pub(crate) const ENTER: &str = "\r";
pub(crate) const ESCAPE: &str = "\x1b";
pub(crate) const BACKSPACE: &str = "\x7f";
pub(crate) const CTRL_C: &str = "\x03";
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Terminal {
    ours: File,
    /// Keeps the terminal there when the program has gone, so that its state can be asked for.
    theirs: File,
    program: Child,
    output: Receiver<Vec<u8>>,
    /// What the program has written, and how much of it was looked for already.
    text: String,
    seen: usize,
}

impl Terminal {
    /// Starts a program on a terminal of 24 lines of 100 columns.
    pub(crate) fn start(mut command: Command) -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let size = Winsize {
            ws_row: 24,
            ws_col: 100,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&ours, size).unwrap();
        let name = PathBuf::from(ptsname(&ours, Vec::new()).unwrap().into_string().unwrap());
        let theirs = File::options().read(true).write(true).open(name).unwrap();
        let end = || OwnedFd::from(theirs.try_clone().unwrap());
        command
            .env("TERM", "xterm-256color")
            .stdin(end())
            .stdout(end())
            .stderr(end());
        let program = command.spawn().unwrap();

        let mut reader = File::from(ours.try_clone().unwrap());
        let (sender, output) = mpsc::channel();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            // Ends with the terminal, or with the test.
            while let Ok(count) = reader.read(&mut piece)
                && sender.send(piece[..count].to_vec()).is_ok()
            {}
        });
        Self {
            ours: ours.into(),
            theirs,
            program,
            output,
            text: String::new(),
            seen: 0,
        }
    }

    /// Waits until the program has written `text` since what was last waited for.
    pub(crate) fn wait_for(&mut self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.text[self.seen..].find(text) {
                self.seen += at + text.len();
                return;
            }
            match self
                .output
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(piece) => self.text += &String::from_utf8_lossy(&piece),
                Err(_) => panic!("no {text:?} after\n{:?}", &self.text[self.seen..]),
            }
        }
    }

    /// What has been written so far.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn type_in(&mut self, keys: &[&str]) {
        self.ours.write_all(keys.concat().as_bytes()).unwrap();
    }

    /// Waits for a question, then types.
    pub(crate) fn answer(&mut self, question: &str, keys: &[&str]) {
        self.wait_for(question);
        // The line below a question is drawn last.
        self.wait_for("Ctrl-C quits");
        self.type_in(keys);
    }

    /// Waits for the program's end; says whether it left the terminal as a shell needs it.
    pub(crate) fn ended(&mut self) -> (ExitStatus, bool) {
        let status = self.program.wait().unwrap();
        let modes = tcgetattr(&self.theirs).unwrap().local_modes;
        (status, modes.contains(LocalModes::ICANON | LocalModes::ECHO))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}
