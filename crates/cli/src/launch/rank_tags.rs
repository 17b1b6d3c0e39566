//! Takes the output of `mpirun --tag-output` apart: which rank has written which bytes.
//!
//! Open MPI puts a tag such as `[1,2]<stdout>:` (job 1, rank 2) before every piece of output that it gets from a rank, and
//! after every line end within one. A piece need not be a line, so that ranks' lines may be cut by each other's; what comes
//! at the beginning of a line without a tag is `mpirun`'s own.

use std::collections::BTreeMap;

use super::line_splitter::LineSplitter;

/// Whose bytes they are: a rank's, or `mpirun`'s own.
pub(super) type Writer = Option<usize>;

/// Puts each rank's pieces together to whole lines.
#[derive(Debug, Default)]
pub(super) struct TaggedLines {
    /// The beginning of what may be a tag.
    pending: Vec<u8>,
    writer: Writer,
    of_writers: BTreeMap<Writer, LineSplitter>,
}

/// What a tag may turn out to be.
#[derive(Debug, PartialEq, Eq)]
enum Tag {
    /// One of this rank's and of this many bytes.
    Of(usize, usize),
    /// More bytes must come to tell.
    Open,
    None,
}

impl TaggedLines {
    /// Adds `bytes` and calls `each` with every line that they complete, its line end included.
    pub(super) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(Writer, &[u8])) {
        let mut bytes = [std::mem::take(&mut self.pending).as_slice(), bytes].concat();
        let mut start = 0;
        let mut position = 0;
        while let Some(found) = bytes[position..].iter().position(|byte| matches!(byte, b'[' | b'\n')) {
            position += found;
            if bytes[position] == b'\n' {
                position += 1;
                self.give(&bytes[start..position], &mut each);
                (start, self.writer) = (position, None);
                continue;
            }
            match Tag::at(&bytes[position..]) {
                Tag::Of(rank, length) => {
                    self.give(&bytes[start..position], &mut each);
                    position += length;
                    (start, self.writer) = (position, Some(rank));
                }
                Tag::Open => {
                    self.pending = bytes.split_off(position);
                    break;
                }
                Tag::None => position += 1,
            }
        }
        self.give(&bytes[start..], &mut each);
    }

    /// Calls `each` with what is left: lines without an end.
    pub(super) fn finish(&mut self, mut each: impl FnMut(Writer, &[u8])) {
        let left = std::mem::take(&mut self.pending);
        self.give(&left, &mut each);
        for (writer, splitter) in &mut self.of_writers {
            splitter.finish(|line| each(*writer, line));
        }
    }

    fn give(&mut self, bytes: &[u8], each: &mut impl FnMut(Writer, &[u8])) {
        let writer = self.writer;
        let splitter = self.of_writers.entry(writer).or_default();
        splitter.feed(bytes, |line| each(writer, line));
    }
}

impl Tag {
    /// Reads the tag with which `bytes` begin.
    fn at(bytes: &[u8]) -> Self {
        let digits = |bytes: &[u8]| bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let after = |position: usize| bytes.get(position..).unwrap_or_default();
        let job = 1 + digits(after(1));
        let rank = job + 1 + digits(after(job + 1));
        if job == 1 && job < bytes.len() || bytes.get(job).is_some_and(|byte| *byte != b',') {
            return Self::None;
        }
        for stream in ["]<stdout>:", "]<stderr>:"] {
            let rest = after(rank);
            if rank > job + 1 && rest.starts_with(stream.as_bytes()) {
                let number = String::from_utf8_lossy(&bytes[job + 1..rank]);
                return number
                    .parse()
                    .map_or(Self::None, |number| Self::Of(number, rank + stream.len()));
            }
            if stream.as_bytes().starts_with(rest) {
                return Self::Open;
            }
        }
        Self::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pieces: &[&[u8]]) -> Vec<(Writer, String)> {
        let mut tagged = TaggedLines::default();
        let mut lines = Vec::new();
        let mut keep = |writer, line: &[u8]| lines.push((writer, String::from_utf8(line.to_vec()).unwrap()));
        for piece in pieces {
            tagged.feed(piece, &mut keep);
        }
        tagged.finish(&mut keep);
        lines
    }

    fn expected<const N: usize>(lines: [(Writer, &str); N]) -> Vec<(Writer, String)> {
        lines.map(|(writer, line)| (writer, line.to_owned())).to_vec()
    }

    #[test]
    fn lines_that_ranks_have_cut_are_whole_again() {
        // As Open MPI 4.1.4 writes it: rank 0 wrote "a b" and, later, "d".
        let text = b"[1,0]<stdout>:hi\n[1,0]<stdout>:a b[1,1]<stdout>:hi\n[1,1]<stdout>:a [b][1,0]<stdout>:d\n\
                     [1,1]<stdout>:d\nmpirun noticed [[1,2],3]\n[1,12]<stderr>:[2, 3] and [1,x]\n[1,0]<stdout>:rest";
        let expected = expected([
            (Some(0), "hi\n"),
            (Some(1), "hi\n"),
            (Some(0), "a bd\n"),
            (Some(1), "a [b]d\n"),
            (None, "mpirun noticed [[1,2],3]\n"),
            (Some(12), "[2, 3] and [1,x]\n"),
            (Some(0), "rest"),
        ]);
        assert_eq!(lines(&[text]), expected);
        for cut in 0..=text.len() {
            let (head, tail) = text.split_at(cut);
            assert_eq!(lines(&[head, tail]), expected, "cut at {cut}");
        }
        assert_eq!(lines(&text.chunks(1).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn the_beginning_of_a_tag_at_the_end_is_text() {
        assert_eq!(
            lines(&[b"[1,0]<stdout>:x [1,0]<std"]),
            expected([(Some(0), "x [1,0]<std")])
        );
    }
}
