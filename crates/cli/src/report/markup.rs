//! Text within HTML and SVG.

/// Returns what tells which things have a colour and dashes (as SVG's `stroke-dasharray`): a sample, and their label.
pub(super) fn key(colour: &str, dashes: &str, label: &str) -> String {
    let sample = match dashes.split_once(' ') {
        None => colour.to_owned(),
        Some((dash, gap)) => {
            format!("repeating-linear-gradient(90deg,{colour} 0 {dash}px,transparent 0 calc({dash}px + {gap}px))")
        }
    };
    format!("<i style=\"background:{sample}\"></i>{}", escaped(label))
}

/// Returns text that means itself, within elements and within attributes.
pub(super) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            // What XML has no place for.
            control if control.is_control() => escaped.push(' '),
            plain => escaped.push(plain),
        }
    }
    escaped
}
