//! Cuts a rank's output, which arrives in arbitrary pieces of bytes, into whole lines.

/// A line longer than this many bytes is passed on in pieces of about this size, so that output without line ends
/// (binary data) cannot fill the launcher's memory.
const LONGEST_LINE: usize = 8 << 20;

/// Collects bytes until they make whole lines.
///
/// A line ends with `\n`, `\r\n`, or a lone `\r`: progress bars redraw themselves with the latter, and must show
/// without waiting for the end of the line.
#[derive(Debug, Default)]
pub(super) struct LineSplitter {
    pending: Vec<u8>,
    /// How many bytes of `pending` are known to hold no line end.
    searched: usize,
}

impl LineSplitter {
    /// Adds `bytes` and calls `each` with every line that they complete, its line end included.
    pub(super) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) {
        self.pending.extend_from_slice(bytes);
        let mut start = 0;
        let mut position = self.searched;
        while let Some(found) = self.pending[position..]
            .iter()
            .position(|byte| matches!(byte, b'\n' | b'\r'))
        {
            position += found;
            let end = match (self.pending[position], self.pending.get(position + 1)) {
                (b'\n', _) => position + 1,
                (_, Some(b'\n')) => position + 2,
                (_, Some(_)) => position + 1,
                // Only the next byte tells whether this `\r` is a line end of its own.
                (_, None) => break,
            };
            each(&self.pending[start..end]);
            start = end;
            position = end;
        }
        self.pending.drain(..start);
        self.searched = self.pending.len() - usize::from(self.pending.ends_with(b"\r"));
        if self.pending.len() > LONGEST_LINE {
            self.finish(each);
        }
    }

    /// Calls `each` with what is left, an unfinished line, if anything is.
    pub(super) fn finish(&mut self, mut each: impl FnMut(&[u8])) {
        if !self.pending.is_empty() {
            each(&self.pending);
        }
        self.pending.clear();
        self.searched = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pieces: &[&[u8]]) -> Vec<String> {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        let mut keep = |line: &[u8]| lines.push(String::from_utf8(line.to_vec()).unwrap());
        for piece in pieces {
            splitter.feed(piece, &mut keep);
        }
        splitter.finish(&mut keep);
        lines
    }

    #[test]
    fn lines_do_not_depend_on_how_the_bytes_were_cut() {
        let text = b"one\ntwo\r\n\n\r10%\r20%\r\rdone\r\nrest";
        let expected = [
            "one\n", "two\r\n", "\n", "\r", "10%\r", "20%\r", "\r", "done\r\n", "rest",
        ];
        assert_eq!(lines(&[text]), expected);
        for cut in 0..=text.len() {
            let (head, tail) = text.split_at(cut);
            assert_eq!(lines(&[head, tail]), expected, "cut at {cut}");
        }
        assert_eq!(lines(&text.chunks(1).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn a_progress_bar_shows_before_its_line_ends() {
        let mut splitter = LineSplitter::default();
        let mut lines = Vec::new();
        splitter.feed(b"\r10%\r2", |line| lines.push(line.to_vec()));
        assert_eq!(lines, [b"\r".to_vec(), b"10%\r".to_vec()]);
    }

    #[test]
    fn bytes_without_line_ends_do_not_pile_up() {
        let mut splitter = LineSplitter::default();
        let piece = vec![0_u8; 1 << 20];
        let mut passed_on = 0;
        for _ in 0..20 {
            splitter.feed(&piece, |line| passed_on += line.len());
            assert!(splitter.pending.len() <= LONGEST_LINE);
        }
        splitter.finish(|line| passed_on += line.len());
        assert_eq!(passed_on, 20 << 20);
    }
}
