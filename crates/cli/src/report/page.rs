//! The page: a table of the runs, a plot for each value, and bars for time.

use std::collections::BTreeSet;

use super::bars::bars;
use super::colours::{colour, dashes};
use super::line_plot::{Line, line_plot};
use super::markup::{escaped, key};
use super::run::Run;

const STYLE: &str = "
body { margin: 0 auto; max-width: 1240px; padding: 16px 20px; background: #fff; color: #1a1a1a;
  font: 15px/1.45 system-ui, 'Liberation Sans', Arial, sans-serif; }
h1 { font-size: 22px; margin: 4px 0 12px; } h2 { font-size: 17px; margin: 20px 0 4px; }
table { border-collapse: collapse; margin: 0 0 8px; }
th, td { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
.plots { display: grid; grid-template-columns: 1fr 1fr; gap: 8px 24px; }
@media (max-width: 900px) { .plots { grid-template-columns: 1fr; } }
svg { width: 100%; height: auto; display: block; }
.legend { margin: 2px 0 4px; font-size: 13px; } .legend span { margin-right: 16px; white-space: nowrap; }
i { display: inline-block; width: 22px; height: 10px; margin-right: 6px; border-radius: 2px; }
.note { font-size: 13px; color: #555; margin: 2px 0; }
";

/// Of plots, wherever they stand.
pub(super) const PLOT_STYLE: &str = "
svg text { font-size: 13px; fill: #1a1a1a; } svg text.name { font-size: 14px; }
.grid { stroke: #e3e3e3; } .axis { stroke: #444; fill: none; }
";

/// Returns the whole page.
pub(super) fn of(runs: &[Run]) -> String {
    let title = match runs {
        [run] => format!("Run {}", escaped(&run.label)),
        runs => format!("{} runs", runs.len()),
    };
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
         <style>{STYLE}{PLOT_STYLE}</style></head><body>\n<h1>{title}</h1>\n"
    );
    let mut put = |text: std::fmt::Arguments<'_>| html += &format!("{text}\n");
    put(format_args!("{}", table(runs)));
    put(format_args!("<div class=\"plots\">"));
    for name in names(runs) {
        put(format_args!("{}", figure(runs, &name)));
    }
    put(format_args!("</div>"));
    let traced = Vec::from_iter(runs.iter().filter(|run| !run.times.is_empty()));
    if !traced.is_empty() {
        put(format_args!(
            "<h2>Time by phase and rank</h2><p class=\"note\">Time within a span that lies in another counts for the inner one.</p>"
        ));
    }
    for run in traced {
        put(format_args!("<h2>{}</h2>{}", escaped(&run.label), bars(&run.times)));
    }
    for note in runs.iter().flat_map(|run| &run.notes) {
        put(format_args!("<p class=\"note\">{}</p>", escaped(note)));
    }
    html += "</body></html>\n";
    html
}

/// One row a run: what it came to.
fn table(runs: &[Run]) -> String {
    let mut html = String::from(
        "<table><tr><th>run</th><th>steps</th><th>last loss</th><th>lowest loss</th><th>median tokens/s</th><th>duration</th></tr>",
    );
    for (number, run) in runs.iter().enumerate() {
        let losses = run.values.get("loss");
        let steps = run.values.values().map(std::collections::BTreeMap::len).max();
        let finite = losses
            .into_iter()
            .flat_map(|values| values.values().copied().filter(|value| value.is_finite()));
        let cell =
            |value: Option<f64>, decimals: usize| value.map_or("-".into(), |value| format!("{value:.decimals$}"));
        let duration = run.wall_times.first_key_value().zip(run.wall_times.last_key_value());
        let duration = duration.map_or("-".into(), |(first, last)| format!("{:.1} s", last.1 - first.1));
        html += &format!(
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{duration}</td></tr>",
            key_of(runs, number),
            steps.unwrap_or(0),
            cell(run.last("loss"), 4),
            cell(finite.reduce(f64::min), 4),
            cell(median(run, "tokens_per_second"), 0),
        );
    }
    html + "</table>"
}

/// The key to a run's lines.
fn key_of(runs: &[Run], number: usize) -> String {
    key(colour(number), dashes(number), &runs[number].label)
}

fn median(run: &Run, name: &str) -> Option<f64> {
    let mut values = Vec::from_iter(
        run.values
            .get(name)?
            .values()
            .copied()
            .filter(|value| value.is_finite()),
    );
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// All names that are logged, those first that are looked at first.
pub(super) fn names(runs: &[Run]) -> Vec<String> {
    let names = runs.iter().flat_map(|run| run.values.keys().cloned());
    let mut names = Vec::from_iter(BTreeSet::from_iter(names));
    let place = |name: &String| {
        let parts = ["loss", "lr", "learning_rate", "grad_norm", "per_second", "memory"];
        parts.iter().position(|part| name.contains(part)).unwrap_or(parts.len())
    };
    names.sort_by_cached_key(place);
    names
}

/// A title, and the unit that stands at the axis.
pub(super) fn title_and_unit(name: &str) -> (String, String) {
    let (title, unit) = match name {
        "loss" => ("Loss", "loss"),
        "lr" | "learning_rate" => ("Learning rate", "learning rate"),
        "grad_norm" => ("Norm of the gradients", "global L2 norm, before clipping"),
        "tokens_per_second" => ("Throughput", "tokens/s, all ranks"),
        "samples_per_second" => ("Throughput", "samples/s, all ranks"),
        "memory_mib" => ("Training state of rank 0", "MiB"),
        other => {
            let unit = match other.rsplit_once('_') {
                Some((_, "mib")) => "MiB",
                Some((_, "gib")) => "GiB",
                Some((_, "bytes")) => "bytes",
                Some((_, "seconds")) => "seconds",
                _ => other,
            };
            return (other.into(), unit.into());
        }
    };
    (title.into(), unit.into())
}

fn figure(runs: &[Run], name: &str) -> String {
    let (title, unit) = title_and_unit(name);
    let lines = lines_of(runs, name);
    let mut html = format!("<section><h2>{}</h2>", escaped(&title));
    if runs.len() > 1 {
        let entry = |line: &Line<'_>| format!("<span>{}</span>", key_of(runs, line.run));
        html += &format!("<p class=\"legend\">{}</p>", String::from_iter(lines.iter().map(entry)));
    }
    html += &line_plot(&lines, &unit).unwrap_or_else(|| "<p class=\"note\">no value is finite</p>".into());
    for line in &lines {
        let lost = line.values.values().filter(|value| !value.is_finite()).count();
        if lost > 0 {
            let label = escaped(&runs[line.run].label);
            html += &format!("<p class=\"note\">{label}: {lost} steps without a finite value</p>");
        }
    }
    html + "</section>"
}

/// The values of a name, of all runs that have it.
pub(super) fn lines_of<'r>(runs: &'r [Run], name: &str) -> Vec<Line<'r>> {
    let lines = runs.iter().enumerate().filter_map(|(run, of)| {
        let values = of.values.get(name)?;
        Some(Line { run, values })
    });
    lines.collect()
}
