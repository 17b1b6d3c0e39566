//! The messages of an event file.
//!
//! Source: TensorBoard's `compat/proto/event.proto`, `summary.proto`, `tensor.proto` and `tensor_shape.proto`; fields are
//! theirs by number.

use super::super::Moment;
use super::protobuf::Message;

/// `DT_STRING`.
const STRING: u64 = 7;
/// Red, green, blue, and how opaque; PNG files say themselves what they have.
const COLOUR_CHANNELS: u64 = 4;

/// Returns the event that a file begins with.
pub(super) fn first(at: Moment) -> Message {
    Message::default().double(1, at.wall_time).block(3, "brain.Event:2")
}

/// Returns an event of several values.
pub(super) fn of(at: Moment, values: &[Message]) -> Message {
    let summary = values
        .iter()
        .fold(Message::default(), |summary, value| summary.block(1, value));
    Message::default()
        .double(1, at.wall_time)
        .integer(2, at.step)
        .block(5, summary)
}

pub(super) fn scalar(name: &str, value: f64) -> Message {
    Message::default().block(1, name).float(2, value as f32)
}

/// Returns a text, as a tensor of one string for the plugin of texts.
pub(super) fn text(name: &str, text: &str) -> Message {
    let shape = Message::default().block(2, Message::default().integer(1, 1));
    let tensor = Message::default().integer(1, STRING).block(2, shape).block(8, text);
    let plugin = Message::default().block(1, "text");
    Message::default()
        .block(1, name)
        .block(8, tensor)
        .block(9, Message::default().block(1, plugin))
}

/// Returns an image of `[width, height]` pixels.
pub(super) fn image(name: &str, [width, height]: [u32; 2], png: &[u8]) -> Message {
    let image = Message::default()
        .integer(1, height.into())
        .integer(2, width.into())
        .integer(3, COLOUR_CHANNELS)
        .block(4, png);
    Message::default().block(1, name).block(4, image)
}

/// Returns a histogram of finite values, at least one, in `bars` parts of equal width.
pub(super) fn histogram(name: &str, values: &[f64], bars: usize) -> Message {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let bars = if low < high { bars } else { 1 };
    // Divided first: the difference of two finite numbers need not be finite.
    let width = high / bars as f64 - low / bars as f64;
    let mut counts = vec![0.0; bars];
    for value in values {
        let bar = if width > 0.0 {
            ((value / width) - (low / width)) as usize
        } else {
            0
        };
        counts[bar.min(bars - 1)] += 1.0;
    }
    let end = |bar: usize| {
        if bar + 1 == bars {
            high
        } else {
            low + width * (bar + 1) as f64
        }
    };
    let histogram = Message::default()
        .double(1, low)
        .double(2, high)
        .double(3, values.len() as f64)
        .double(4, values.iter().sum())
        .double(5, values.iter().map(|value| value * value).sum())
        .doubles(6, &Vec::from_iter((0..bars).map(end)))
        .doubles(7, &counts);
    Message::default().block(1, name).block(5, histogram)
}
