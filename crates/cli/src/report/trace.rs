//! Where the time of a rank went, from the trace of its spans.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::command_error::CommandError;

/// The time of one thread of one rank, in seconds.
#[derive(Debug, PartialEq)]
pub(super) struct RankTime {
    pub(super) rank: u64,
    pub(super) thread: String,
    /// Time in spans, without that in spans within them, by phase.
    pub(super) phases: BTreeMap<String, f64>,
    /// From the first span of the rank to the end of its last.
    pub(super) whole: f64,
}

/// A span, in microseconds.
#[derive(Debug)]
struct Span {
    thread: u64,
    begin: f64,
    end: f64,
    /// Its category: the name without the unit, bucket or operation that it was for.
    phase: String,
}

/// Reads the traces of all ranks in a folder; none, where there are none.
///
/// # Errors
/// Names the file, and the line of what is no event.
pub(super) fn read_folder(folder: &Path, notes: &mut Vec<String>) -> Result<Vec<RankTime>, CommandError> {
    let mut ranks = BTreeMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("trace-rank-")?.strip_suffix(".json"));
        if let Some(rank) = number.and_then(|number| number.parse::<u64>().ok()) {
            ranks.insert(rank, entry.path());
        }
    }
    let mut times = Vec::new();
    for (rank, path) in ranks {
        let text = fs::read_to_string(&path);
        let text = text.map_err(|error| CommandError::failure(format!("{}: {error}", path.display())))?;
        let (events, is_torn) = events_of(&text)
            .map_err(|(line, reason)| CommandError::failure(format!("{}:{line}: {reason}", path.display())))?;
        if is_torn {
            notes.push(format!("{}: the last line is cut off: left out", path.display()));
        }
        times.extend(times_of(rank, &events));
    }
    Ok(times)
}

/// Returns the events of a trace that has one a line, in an array that may end anywhere, and whether it ends in one.
fn events_of(text: &str) -> Result<(Vec<Value>, bool), (usize, String)> {
    let mut events = Vec::new();
    let count = text.lines().count();
    for (index, line) in text.lines().enumerate() {
        let line = line
            .trim()
            .trim_start_matches('[')
            .trim_end_matches(']')
            .trim_end_matches(',');
        if line.is_empty() {
            continue;
        }
        match serde_json::from_str::<Value>(line) {
            Ok(event) if event.get("ph").is_some() => events.push(event),
            Err(_) if index + 1 == count && index > 0 => return Ok((events, true)),
            _ => {
                let reason = "not an event of a trace; expected the file that --profile writes, an event a line";
                return Err((index + 1, reason.into()));
            }
        }
    }
    Ok((events, false))
}

fn times_of(rank: u64, events: &[Value]) -> Vec<RankTime> {
    let mut names = BTreeMap::new();
    let mut spans = Vec::new();
    for event in events {
        let thread = event["tid"].as_u64().unwrap_or(0);
        let name = event["name"].as_str().unwrap_or_default();
        match event["ph"].as_str() {
            Some("M") if name == "thread_name" => {
                let name = event["args"]["name"].as_str().unwrap_or("thread");
                names.insert(thread, name.to_owned());
            }
            Some("X") => {
                if let (Some(begin), Some(took)) = (event["ts"].as_f64(), event["dur"].as_f64()) {
                    spans.push(Span {
                        thread,
                        begin,
                        end: begin + took,
                        phase: event["cat"].as_str().unwrap_or(name).to_owned(),
                    });
                }
            }
            _ => {}
        }
    }
    let first = spans.iter().map(|span| span.begin).fold(f64::INFINITY, f64::min);
    let last = spans.iter().map(|span| span.end).fold(0.0, f64::max);
    // What lies within another span comes after it.
    spans.sort_by(|one, other| {
        (one.thread, one.begin)
            .partial_cmp(&(other.thread, other.begin))
            .unwrap_or(std::cmp::Ordering::Equal)
            .then(other.end.total_cmp(&one.end))
    });
    let mut by_thread: BTreeMap<u64, BTreeMap<String, f64>> = BTreeMap::new();
    let mut open: Vec<&Span> = Vec::new();
    for span in &spans {
        let phases = by_thread.entry(span.thread).or_default();
        while open
            .last()
            .is_some_and(|outer| outer.thread != span.thread || outer.end <= span.begin)
        {
            open.pop();
        }
        let seconds = (span.end - span.begin) * 1e-6;
        if let Some(outer) = open.last() {
            *phases.entry(outer.phase.clone()).or_default() -= seconds;
        }
        *phases.entry(span.phase.clone()).or_default() += seconds;
        open.push(span);
    }
    let time = |(thread, phases): (u64, BTreeMap<String, f64>)| RankTime {
        rank,
        thread: names
            .get(&thread)
            .cloned()
            .unwrap_or_else(|| format!("thread {thread}")),
        phases: phases
            .into_iter()
            .map(|(phase, seconds)| (phase, seconds.max(0.0)))
            .collect(),
        whole: (last - first) * 1e-6,
    };
    by_thread.into_iter().map(time).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_within_an_inner_span_is_not_the_outer_ones() {
        let text = r#"[
{"name":"thread_name","ph":"M","pid":0,"tid":0,"args":{"name":"main"}},
{"name":"wait for bucket 1","cat":"wait for bucket","ph":"X","pid":0,"tid":0,"ts":5000000.0,"dur":1000000.0},
{"name":"backward","ph":"X","pid":0,"tid":0,"ts":3000000.0,"dur":4000000.0},
{"name":"forward model.layers.0","cat":"forward","ph":"X","pid":0,"tid":0,"ts":1000000.0,"dur":2000000.0},
{"name":"reduce bucket 1","cat":"reduce bucket","ph":"X","pid":0,"tid":1,"ts":4000000.0,"dur":2500000.0},
{"name":"forw"#;
        let (events, is_torn) = events_of(text).unwrap();
        assert!(is_torn && events.len() == 5);
        let times = times_of(3, &events);
        let phases = |list: &[(&str, f64)]| list.iter().map(|(phase, time)| ((*phase).to_owned(), *time)).collect();
        let main = RankTime {
            rank: 3,
            thread: "main".into(),
            phases: phases(&[("backward", 3.0), ("forward", 2.0), ("wait for bucket", 1.0)]),
            whole: 6.0,
        };
        let behind = RankTime {
            rank: 3,
            thread: "thread 1".into(),
            phases: phases(&[("reduce bucket", 2.5)]),
            whole: 6.0,
        };
        assert_eq!(times, [main, behind]);
    }

    #[test]
    fn what_is_no_trace_is_refused_with_its_line() {
        assert_eq!(events_of("[\n{\"name\":1},\n{}]").unwrap_err().0, 2);
        assert_eq!(events_of("step,loss\n1,2\n").unwrap_err().0, 1);
        assert_eq!(
            events_of("[\n{\"ph\":\"X\"},\n{\"ph\n{\"ph\":\"X\"}]\n").unwrap_err().0,
            3
        );
    }
}
