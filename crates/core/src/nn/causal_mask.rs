//! Which earlier positions a position attends to: all, those of a window, those of its own document.

use std::sync::Arc;

/// What a position sees in [`masked_attention`](super::masked_attention()): itself, and those before it that lie in its window
/// and in its document. The default is all before it.
///
/// Both are ranges that end at the position, so that a kernel computes what is seen and nothing else.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CausalMask {
    window: Option<usize>,
    /// Row after row, where the document of each position begins.
    starts: Option<Arc<[u32]>>,
}

impl CausalMask {
    /// Makes a mask of rows that hold several documents: `starts` says for each position, row after row of the batch, at
    /// which position of the row its document begins.
    pub fn documents(starts: Vec<u32>) -> Self {
        Self {
            window: None,
            starts: Some(starts.into()),
        }
    }

    /// Lets each position see at most `window` positions, itself included (Mistral's sliding window: Jiang et al. 2023, arXiv
    /// 2310.06825); all where that is `None`.
    #[must_use]
    pub fn within(self, window: Option<usize>) -> Self {
        Self { window, ..self }
    }

    pub(super) fn has_documents(&self) -> bool {
        self.starts.is_some()
    }

    /// Returns the first key that a query sees; the last is its own.
    pub(super) fn first_seen(&self, entry: usize, query: usize, sequence: usize) -> usize {
        let of_window = self.window.map_or(0, |window| (query + 1).saturating_sub(window));
        let starts = self.starts.as_ref();
        let of_document = starts.map_or(0, |starts| starts[entry * sequence + query] as usize);
        of_window.max(of_document)
    }

    /// Checks the mask against the queries' shape; an error is the reason.
    pub(super) fn check(&self, queries: &[usize]) -> Result<(), String> {
        if self.window == Some(0) {
            return Err("a window of 0 sees nothing".to_owned());
        }
        let (&[batch, _, sequence, _], Some(starts)) = (queries, &self.starts) else {
            return Ok(());
        };
        if starts.len() != batch * sequence {
            return Err(format!("it has starts for {} positions", starts.len()));
        }
        for (number, &start) in starts.iter().enumerate() {
            let (row, position) = (number / sequence, number % sequence);
            if start as usize > position {
                return Err(format!(
                    "position {position} of row {row} is said to be in a document that begins at {start}"
                ));
            }
        }
        Ok(())
    }
}
