//! Plots as PNG files, for where a page of HTML cannot go: a picture each, with its own title and key.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use resvg::usvg::{self, fontdb};
use resvg::{render, tiny_skia};

use super::bars::{ELSEWHERE, bars, phases};
use super::colours::{colour, dashes};
use super::line_plot::line_plot;
use super::markup::escaped;
use super::page::{PLOT_STYLE, lines_of, names, title_and_unit};
use super::run::Run;
use crate::command_error::CommandError;

/// Pixels for each unit of a drawing: sharp on screens and on paper.
const SCALE: f32 = 2.0;
const MARGIN: f64 = 16.0;
const TITLE: f64 = 34.0;
const ROW: f64 = 19.0;
const STYLE: &str = "svg text.title { font-size: 18px; } svg rect.paper { fill: #fff; }";

/// What has a colour: the colour, its dashes, and a label.
type Key = (&'static str, &'static str, String);

/// Writes a picture for every plot of the page into a folder, which is made if need be; returns a note of what is
/// not in them.
///
/// Text has a font of the program's own, so that pictures are the same on every machine, whatever fonts it has.
///
/// # Errors
/// Names the file or folder that cannot be written.
pub(super) fn write(runs: &[Run], folder: &Path) -> Result<Option<String>, CommandError> {
    let failure =
        |path: &Path, reason: &dyn std::fmt::Display| CommandError::failure(format!("{}: {reason}", path.display()));
    fs::create_dir_all(folder).map_err(|error| failure(folder, &error))?;
    let settings = settings();
    let (mut taken, mut lost) = (Vec::new(), String::new());
    for (name, drawing) in drawings(runs) {
        let mut file = file_name(&name);
        while taken.contains(&file) {
            file.push('_');
        }
        let path = folder.join(format!("{file}.png"));
        taken.push(file);
        let picture = picture(&drawing, &settings, &mut lost).map_err(|reason| failure(&path, &reason))?;
        fs::write(&path, picture).map_err(|error| failure(&path, &error))?;
    }
    Ok((!lost.is_empty()).then(|| {
        let letters = Vec::from_iter(lost.chars().map(|letter| format!("{letter:?}")));
        format!(
            "{}: pictures have boxes for {}, which their font does not have; the page has all letters",
            folder.display(),
            letters.join(", ")
        )
    }))
}

/// Returns the name and the SVG of each picture.
fn drawings(runs: &[Run]) -> Vec<(String, String)> {
    let mut drawings = Vec::new();
    for name in names(runs) {
        let (title, unit) = title_and_unit(&name);
        let lines = lines_of(runs, &name);
        let Some(plot) = line_plot(&lines, &unit) else { continue };
        let keys = lines.iter().map(|line| {
            let label = runs[line.run].label.clone();
            (colour(line.run), dashes(line.run), label)
        });
        // The title names a run that is alone.
        let (title, keys) = match runs {
            [run] => (format!("{title}: {}", run.label), Vec::new()),
            _ => (title, keys.collect()),
        };
        drawings.push((name, drawing(&title, &keys, &plot)));
    }
    for run in runs.iter().filter(|run| !run.times.is_empty()) {
        let phases = phases(&run.times).into_iter().enumerate();
        let keys = phases
            .map(|(number, (phase, seconds))| (colour(number), "none", format!("{phase} ({seconds:.3} s a rank)")));
        let keys = Vec::from_iter(keys.chain([(ELSEWHERE, "none", "in no span".into())]));
        let html = bars(&run.times);
        let plot = html.find("<svg").map_or("", |at| &html[at..]);
        let title = format!("Time by phase and rank: {}", run.label);
        drawings.push((format!("time {}", run.label), drawing(&title, &keys, plot)));
    }
    drawings
}

/// Puts a title and a key above a plot.
fn drawing(title: &str, keys: &[Key], plot: &str) -> String {
    let [width, height] = size_of(plot);
    let columns = if width > 800.0 { 3 } else { 1 };
    let rows = keys.len().div_ceil(columns) as f64;
    let top = TITLE + rows * ROW + 8.0;
    let (whole_width, whole_height) = (width + 2.0 * MARGIN, top + height + MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{whole_width}\" height=\"{whole_height}\">\n\
         <rect class=\"paper\" width=\"{whole_width}\" height=\"{whole_height}\"/>\n\
         <text class=\"title\" x=\"{MARGIN}\" y=\"26\">{}</text>\n",
        escaped(title)
    );
    for (number, (colour, dashes, label)) in keys.iter().enumerate() {
        let x = MARGIN + (number % columns) as f64 * width / columns as f64;
        let y = TITLE + (number / columns) as f64 * ROW + ROW / 2.0;
        svg += &format!(
            "<line x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{colour}\" stroke-dasharray=\"{dashes}\" \
             stroke-width=\"4\"/><text x=\"{}\" y=\"{}\">{}</text>\n",
            x + 28.0,
            x + 36.0,
            y + 4.5,
            escaped(label)
        );
    }
    let plot = plot.replacen(
        "<svg ",
        &format!("<svg x=\"{MARGIN}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" "),
        1,
    );
    svg + &plot + "</svg>\n"
}

/// Returns width and height of a plot's own units.
fn size_of(plot: &str) -> [f64; 2] {
    let after = plot.split_once("viewBox=\"0 0 ").map_or("", |(_, after)| after);
    let mut numbers = after.split(['"', ' ']).map(|number| number.parse().unwrap_or(1.0));
    [numbers.next().unwrap_or(1.0), numbers.next().unwrap_or(1.0)]
}

fn settings() -> usvg::Options<'static> {
    let mut fonts = fontdb::Database::new();
    fonts.load_font_data(epaint_default_fonts::UBUNTU_LIGHT.to_vec());
    // For letters and signs that the first one does not have.
    fonts.load_font_data(epaint_default_fonts::HACK_REGULAR.to_vec());
    let family = fonts.faces().next().and_then(|face| face.families.first());
    let family = family.map_or(String::new(), |(name, _)| name.clone());
    usvg::Options {
        font_family: family,
        fontdb: Arc::new(fonts),
        style_sheet: Some([PLOT_STYLE, STYLE].concat()),
        ..usvg::Options::default()
    }
}

/// Returns a PNG file, and adds the letters that no font has to `lost`.
fn picture(svg: &str, settings: &usvg::Options<'_>, lost: &mut String) -> Result<Vec<u8>, String> {
    // XML has no such letters, not even escaped; names of values have all that JSON has.
    let is_none =
        |letter: char| (letter.is_control() && !"\n\t".contains(letter)) || "\u{fffe}\u{ffff}".contains(letter);
    let svg = svg.replace(is_none, "\u{fffd}");
    let tree = usvg::Tree::from_str(&svg, settings).map_err(|error| error.to_string())?;
    let size = tree.size();
    let [width, height] = [size.width(), size.height()].map(|length| (length * SCALE).ceil() as u32);
    let pixels = tiny_skia::Pixmap::new(width, height);
    let mut pixels = pixels.ok_or_else(|| format!("a picture of {width} by {height} pixels cannot be made"))?;
    render(
        &tree,
        tiny_skia::Transform::from_scale(SCALE, SCALE),
        &mut pixels.as_mut(),
    );
    add_lost(tree.root(), lost);
    pixels.encode_png().map_err(|error| error.to_string())
}

fn add_lost(group: &usvg::Group, lost: &mut String) {
    for node in group.children() {
        match node {
            usvg::Node::Group(group) => add_lost(group, lost),
            usvg::Node::Text(text) => {
                let glyphs = text.layouted().iter().flat_map(|span| &span.positioned_glyphs);
                for glyph in glyphs.filter(|glyph| glyph.id.0 == 0) {
                    let new = glyph.text.chars().filter(|letter| !lost.contains(*letter));
                    let new = String::from_iter(new);
                    lost.push_str(&new);
                }
            }
            _ => {}
        }
    }
}

/// A name in which everything but letters, digits, `-`, `_` and `.` is `_`, and that is no hidden file's.
fn file_name(name: &str) -> String {
    let fits = |character: char| character.is_alphanumeric() || "-_.".contains(character);
    let name = String::from_iter(
        name.chars()
            .map(|character| if fits(character) { character } else { '_' }),
    );
    if name.starts_with('.') {
        format!("_{name}")
    } else {
        name
    }
}
