//! `sconce checkpoint diff`: how the arrays of two checkpoints differ.

use std::path::Path;
use std::process::ExitCode;

use sconce_core::checkpoint::{Difference, DifferenceKind};
use serde_json::json;

use super::open;
use super::table::table;
use crate::command_error::CommandError;
use crate::terminal::print;

/// Runs `sconce checkpoint diff`.
pub(super) fn run(first: &Path, second: &Path, json: bool) -> Result<ExitCode, CommandError> {
    let (mut first, mut second) = (open(first)?, open(second)?);
    let mut differences = Vec::new();
    first
        .compare(&mut second, |difference| differences.push(difference))
        .map_err(CommandError::failure)?;
    let text = if json {
        let object = json!({"first": first.folder(), "second": second.folder(), "differences": differences});
        format!("{object:#}\n")
    } else if differences.is_empty() {
        "the arrays are the same\n".to_owned()
    } else {
        let rows = Vec::from_iter(differences.iter().map(row));
        table(["MODEL", "NAME", "ARRAY", "DIFFERENCE"], &rows)
    };
    print(&text)?;
    Ok(ExitCode::from(u8::from(!differences.is_empty())))
}

fn row(difference: &Difference) -> [String; 4] {
    [
        difference.model.to_string(),
        difference.name.clone(),
        difference.array.clone().unwrap_or_else(|| "-".to_owned()),
        match &difference.kind {
            DifferenceKind::OnlyInFirst => "only in the first".to_owned(),
            DifferenceKind::OnlyInSecond => "only in the second".to_owned(),
            DifferenceKind::Shape { first, second } => format!("shape {first:?}, in the second {second:?}"),
            DifferenceKind::Values {
                changed,
                elements,
                max_abs_difference,
            } => {
                let furthest =
                    max_abs_difference.map_or_else(|| "no number".to_owned(), |furthest| furthest.to_string());
                format!("{changed} of {elements} values, by {furthest} at most")
            }
        },
    ]
}
