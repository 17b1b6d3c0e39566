//! A plot of one value over steps, a line for each run, as SVG.

use std::collections::BTreeMap;

use super::axis::Axis;
use super::colours::{colour, dashes};
use super::markup::escaped;

/// The values of one run.
pub(super) struct Line<'r> {
    /// The run's number, which decides the colour.
    pub(super) run: usize,
    pub(super) values: &'r BTreeMap<u64, f64>,
}

const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 46.0;
/// Parts of the width in which a line has a lowest and a highest point at most: more could not be seen.
const PARTS: usize = 500;

/// Returns the plot; `None` where no value is finite.
pub(super) fn line_plot(lines: &[Line<'_>], unit: &str) -> Option<String> {
    let points = || lines.iter().flat_map(|line| line.values);
    let finite = || points().map(|(_, value)| *value).filter(|value| value.is_finite());
    let (low, high) = (finite().reduce(f64::min)?, finite().reduce(f64::max)?);
    let (first, last) = (
        points().map(|(step, _)| *step).min()?,
        points().map(|(step, _)| *step).max()?,
    );
    let (steps, values) = (Axis::of_steps(first, last), Axis::around(low, high));
    let x = |step: u64| LEFT + steps.place(step as f64) * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - values.place(value) * (HEIGHT - TOP - BOTTOM);

    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{} over steps\">\n",
        escaped(unit)
    );
    let mut put = |text: std::fmt::Arguments<'_>| svg += &format!("{text}\n");
    for (value, label) in &values.ticks {
        let at = y(*value);
        put(format_args!(
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            at + 4.0
        ));
    }
    for (step, label) in &steps.ticks {
        let (at, base) = (x(*step as u64), HEIGHT - BOTTOM);
        put(format_args!(
            "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{base}\" y2=\"{:.1}\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
            base + 5.0,
            base + 19.0
        ));
    }
    let (base, middle) = (HEIGHT - BOTTOM, (LEFT + WIDTH - RIGHT) / 2.0);
    put(format_args!(
        "<path class=\"axis\" d=\"M{LEFT} {TOP}V{base}H{}\"/>\
         <text class=\"name\" x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">optimizer step</text>\
         <text class=\"name\" transform=\"translate(14 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
        WIDTH - RIGHT,
        HEIGHT - 8.0,
        (TOP + base) / 2.0,
        escaped(unit)
    ));
    for line in lines {
        let (colour, dashes) = (colour(line.run), dashes(line.run));
        for stretch in stretches(line.values) {
            let stretch = thinned(&stretch, first, last);
            if let [(step, value)] = stretch[..] {
                put(format_args!(
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                    x(step),
                    y(value)
                ));
                continue;
            }
            let places = Vec::from_iter(
                stretch
                    .iter()
                    .map(|(step, value)| format!("{:.1},{:.1}", x(*step), y(*value))),
            );
            put(format_args!(
                "<polyline fill=\"none\" stroke=\"{colour}\" stroke-dasharray=\"{dashes}\" stroke-width=\"2\" \
                 stroke-linejoin=\"round\" points=\"{}\"/>",
                places.join(" ")
            ));
        }
    }
    svg += "</svg>\n";
    Some(svg)
}

/// Returns the parts of a line between values that are not finite.
fn stretches(values: &BTreeMap<u64, f64>) -> Vec<Vec<(u64, f64)>> {
    let points = Vec::from_iter(values.iter().map(|(step, value)| (*step, *value)));
    let parts = points.split(|(_, value)| !value.is_finite());
    parts.filter(|part| !part.is_empty()).map(<[_]>::to_vec).collect()
}

/// Returns the points that can be seen: of many in one part of the width, the lowest and the highest.
fn thinned(points: &[(u64, f64)], first: u64, last: u64) -> Vec<(u64, f64)> {
    if points.len() <= 2 * PARTS {
        return points.to_vec();
    }
    let part = |step: u64| ((step - first) as f64 / (last - first) as f64 * PARTS as f64) as usize;
    let mut thinned = Vec::new();
    for of_part in points.chunk_by(|one, other| part(one.0) == part(other.0)) {
        let lowest = of_part.iter().min_by(|one, other| one.1.total_cmp(&other.1));
        let highest = of_part.iter().max_by(|one, other| one.1.total_cmp(&other.1));
        let mut both = Vec::from_iter(lowest.into_iter().chain(highest).copied());
        both.sort_by_key(|(step, _)| *step);
        both.dedup();
        thinned.extend(both);
    }
    thinned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_keeps_its_peaks() {
        let value = |step: u64| if step == 77_777 { 9.0 } else { (step % 10) as f64 / 10.0 };
        let points = Vec::from_iter((0..100_000).map(|step| (step, value(step))));
        let thinned = thinned(&points, 0, 99_999);
        assert!(thinned.len() <= 2 * (PARTS + 1));
        assert!(thinned.contains(&(77_777, 9.0)) && thinned.is_sorted_by_key(|(step, _)| *step));
    }

    #[test]
    fn a_line_has_a_gap_where_a_value_is_no_number() {
        let values = BTreeMap::from([(0, 1.0), (1, 2.0), (2, f64::NAN), (3, 1.0)]);
        let plot = line_plot(
            &[Line {
                run: 0,
                values: &values,
            }],
            "loss",
        )
        .unwrap();
        assert_eq!(
            (plot.matches("<polyline").count(), plot.matches("<circle").count()),
            (1, 1)
        );
        assert!(!plot.contains("NaN") && !plot.contains("inf"));
        let nothing = BTreeMap::from([(0, f64::INFINITY)]);
        assert_eq!(
            line_plot(
                &[Line {
                    run: 0,
                    values: &nothing
                }],
                "loss"
            ),
            None
        );
    }
}
