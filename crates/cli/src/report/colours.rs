//! Colours that can be told apart, also by those who see few, and on paper by their dashes.
//!
//! Source: Okabe and Ito, Color Universal Design (2008), without yellow, which is too faint on white, and with brown and
//! violet.

const COLOURS: [&str; 9] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c564b", "#6a3d9a",
];
const DASHES: [&str; 3] = ["none", "7 3", "2 3"];

/// Returns the colour of the thing with this number.
pub(super) fn colour(number: usize) -> &'static str {
    COLOURS[number % COLOURS.len()]
}

/// Returns the dashes of a line, as SVG's `stroke-dasharray`; colours come again with others.
pub(super) fn dashes(number: usize) -> &'static str {
    DASHES[number / COLOURS.len() % DASHES.len()]
}
