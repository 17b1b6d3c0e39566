//! Operating system, processor and memory, as the kernel tells them.

use std::fs;
use std::thread::available_parallelism;

use super::{Report, gib};

const UNKNOWN: &str = "unknown";

pub(super) fn tell(report: &mut Report) {
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let release = read("/etc/os-release");
    let name = value(&release, "PRETTY_NAME", '=').map(|name| name.trim_matches('"').to_owned());
    report.add("os", name.unwrap_or_else(|| UNKNOWN.to_owned()));
    let system = rustix::system::uname();
    let words = [system.sysname(), system.release(), system.machine()].map(|word| word.to_string_lossy());
    report.add("kernel", words.join(" "));
    let processors = read("/proc/cpuinfo");
    report.add("cpu", value(&processors, "model name", ':').unwrap_or(UNKNOWN));
    report.add("cores", cores(&read("/sys/devices/system/cpu/online")));
    report.add("memory", memory(&read("/proc/meminfo")));
    if let Ok(limit) = read("/sys/fs/cgroup/memory.max").trim().parse() {
        report.add("memory limit", gib(limit));
    }
}

/// What follows `key` and the mark after it, in the first line that begins with them.
fn value<'t>(text: &'t str, key: &str, mark: char) -> Option<&'t str> {
    let value = |line: &'t str| line.strip_prefix(key)?.trim_start().strip_prefix(mark);
    text.lines().find_map(value).map(str::trim)
}

/// How many logical cores this process may use, of which the host has those that `online` lists.
fn cores(online: &str) -> String {
    let usable = available_parallelism().map_or_else(|_| UNKNOWN.to_owned(), |cores| cores.to_string());
    format!("{usable} usable (the host's: {})", online.trim())
}

fn memory(meminfo: &str) -> String {
    let bytes = |key: &str| {
        let kib: u64 = value(meminfo, key, ':')?.split_whitespace().next()?.parse().ok()?;
        Some(gib(kib * 1024))
    };
    match (bytes("MemTotal"), bytes("MemAvailable")) {
        (Some(total), Some(available)) => format!("{total}, {available} available"),
        _ => UNKNOWN.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_whatever_stands_between_key_and_mark() {
        assert_eq!(value("a\t: 1\nmodel name\t: X Y\n", "model name", ':'), Some("X Y"));
        assert_eq!(
            value("NAME=\"A\"\nPRETTY_NAME=\"A 1\"\n", "PRETTY_NAME", '='),
            Some("\"A 1\"")
        );
        assert_eq!(value("MemTotalX: 1\n", "MemTotal", ':'), None);
    }

    #[test]
    fn memory_is_told_in_gib() {
        let text = "MemTotal:       25165824 kB\nMemFree:  1 kB\nMemAvailable:   12582912 kB\n";
        assert_eq!(memory(text), "24.0 GiB, 12.0 GiB available");
        assert_eq!(memory(""), UNKNOWN);
    }
}
