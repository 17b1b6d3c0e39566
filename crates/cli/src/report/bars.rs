//! Where the time of every rank went, as bars of parts.

use std::collections::{BTreeMap, BTreeSet};

use super::axis::Axis;
use super::colours::colour;
use super::markup::{escaped, key};
use super::trace::RankTime;

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 210.0;
const RIGHT: f64 = 24.0;
const BAR: f64 = 24.0;
const GAP: f64 = 10.0;
/// Time in no span.
pub(super) const ELSEWHERE: &str = "#d9d9d9";

/// Returns a bar for each thread of each rank, with a legend that says how long each phase took on the average rank.
pub(super) fn bars(times: &[RankTime]) -> String {
    let phases = phases(times);
    let longest = times.iter().map(|time| time.whole).fold(0.0, f64::max);
    let axis = Axis::around(0.0, longest);
    let x = |seconds: f64| LEFT + axis.place(seconds) * (WIDTH - LEFT - RIGHT);
    let base = times.len() as f64 * (BAR + GAP) + GAP;
    let height = base + 46.0;

    let mut html = String::from("<p class=\"legend\">");
    let mut put = |text: std::fmt::Arguments<'_>| html += &format!("{text}\n");
    for (number, (phase, seconds)) in phases.iter().enumerate() {
        put(format_args!(
            "<span>{}</span>",
            key(colour(number), "none", &format!("{phase} ({seconds:.3} s a rank)"))
        ));
    }
    put(format_args!(
        "<span>{}</span></p>",
        key(ELSEWHERE, "none", "in no span")
    ));
    put(format_args!(
        "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"time by phase and rank\">"
    ));
    for (seconds, label) in &axis.ticks {
        let at = x(*seconds);
        put(format_args!(
            "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"0\" y2=\"{base}\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            base + 16.0
        ));
    }
    for (row, time) in times.iter().enumerate() {
        let top = row as f64 * (BAR + GAP) + GAP;
        put(format_args!(
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">rank {}, {}</text>\
             <rect x=\"{LEFT}\" y=\"{top}\" width=\"{:.2}\" height=\"{BAR}\" fill=\"{ELSEWHERE}\"/>",
            LEFT - 10.0,
            top + 17.0,
            time.rank,
            escaped(&time.thread),
            x(time.whole) - LEFT
        ));
        let mut from = 0.0;
        for (number, (phase, _)) in phases.iter().enumerate() {
            let Some(seconds) = time.phases.get(*phase) else {
                continue;
            };
            put(format_args!(
                "<rect x=\"{:.2}\" y=\"{top}\" width=\"{:.2}\" height=\"{BAR}\" fill=\"{}\">\
                 <title>{}: {seconds:.3} s</title></rect>",
                x(from),
                x(from + seconds) - x(from),
                colour(number),
                escaped(phase)
            ));
            from += seconds;
        }
    }
    put(format_args!(
        "<text class=\"name\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">seconds</text></svg>",
        (LEFT + WIDTH - RIGHT) / 2.0,
        height - 6.0
    ));
    html
}

/// Returns the phases and how many seconds each took on the average rank, the longest first.
pub(super) fn phases(times: &[RankTime]) -> Vec<(&str, f64)> {
    let mut totals: BTreeMap<&str, f64> = BTreeMap::new();
    for (phase, seconds) in times.iter().flat_map(|time| &time.phases) {
        *totals.entry(phase).or_default() += seconds;
    }
    let ranks = BTreeSet::from_iter(times.iter().map(|time| time.rank)).len() as f64;
    let phases = totals.into_iter().map(|(phase, seconds)| (phase, seconds / ranks));
    let mut phases = Vec::from_iter(phases);
    phases.sort_by(|one, other| other.1.total_cmp(&one.1));
    phases
}
