//! The messages of an event file, as far as it has them.
//!
//! Source: TensorBoard's `compat/proto/event.proto`, `summary.proto`, `tensor.proto` and `tensor_shape.proto`; fields are
//! theirs by number.

use super::super::Moment;
use super::super::histogram::Histogram;
use prost::{Message, Oneof};

/// `DT_STRING`.
const STRING: i32 = 7;
/// Red, green, blue, and how opaque; PNG files say themselves what they have.
const COLOUR_CHANNELS: i32 = 4;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(oneof = "Kind", tags = "2, 4, 5, 8")]
    kind: Option<Kind>,
    #[prost(message, optional, tag = "9")]
    metadata: Option<Metadata>,
}

#[derive(Clone, PartialEq, Oneof)]
enum Kind {
    #[prost(float, tag = "2")]
    Scalar(f32),
    #[prost(message, tag = "4")]
    Image(Image),
    #[prost(message, tag = "5")]
    Histogram(HistogramProto),
    #[prost(message, tag = "8")]
    Tensor(Tensor),
}

#[derive(Clone, PartialEq, Message)]
struct Image {
    #[prost(int32, tag = "1")]
    height: i32,
    #[prost(int32, tag = "2")]
    width: i32,
    #[prost(int32, tag = "3")]
    colour_channels: i32,
    #[prost(bytes = "vec", tag = "4")]
    png: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct HistogramProto {
    #[prost(double, tag = "1")]
    low: f64,
    #[prost(double, tag = "2")]
    high: f64,
    #[prost(double, tag = "3")]
    number: f64,
    #[prost(double, tag = "4")]
    sum: f64,
    #[prost(double, tag = "5")]
    sum_of_squares: f64,
    #[prost(double, repeated, tag = "6")]
    limits: Vec<f64>,
    #[prost(double, repeated, tag = "7")]
    counts: Vec<f64>,
}

#[derive(Clone, PartialEq, Message)]
struct Tensor {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<Shape>,
    #[prost(string, repeated, tag = "8")]
    strings: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Shape {
    #[prost(message, repeated, tag = "2")]
    dimensions: Vec<Dimension>,
}

#[derive(Clone, PartialEq, Message)]
struct Dimension {
    #[prost(int64, tag = "1")]
    size: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Metadata {
    #[prost(message, optional, tag = "1")]
    plugin: Option<Plugin>,
}

#[derive(Clone, PartialEq, Message)]
struct Plugin {
    #[prost(string, tag = "1")]
    name: String,
}

/// Returns the event that a file begins with.
pub(super) fn first(at: Moment) -> Event {
    Event {
        wall_time: at.wall_time,
        file_version: Some("brain.Event:2".into()),
        ..Event::default()
    }
}

/// Returns an event of several values.
pub(super) fn of(at: Moment, values: Vec<Value>) -> Event {
    Event {
        wall_time: at.wall_time,
        step: at.step as i64,
        summary: Some(Summary { values }),
        ..Event::default()
    }
}

fn value(name: &str, kind: Kind) -> Value {
    Value {
        tag: name.into(),
        kind: Some(kind),
        metadata: None,
    }
}

pub(super) fn scalar(name: &str, number: f64) -> Value {
    value(name, Kind::Scalar(number as f32))
}

/// Returns a text, as a tensor of one string for the plugin of texts.
pub(super) fn text(name: &str, text: &str) -> Value {
    let dimensions = vec![Dimension { size: 1 }];
    let tensor = Tensor {
        dtype: STRING,
        shape: Some(Shape { dimensions }),
        strings: vec![text.into()],
    };
    let plugin = Some(Plugin { name: "text".into() });
    Value {
        metadata: Some(Metadata { plugin }),
        ..value(name, Kind::Tensor(tensor))
    }
}

/// Returns an image of `[width, height]` pixels.
pub(super) fn image(name: &str, [width, height]: [u32; 2], png: &[u8]) -> Value {
    let image = Image {
        height: height as i32,
        width: width as i32,
        colour_channels: COLOUR_CHANNELS,
        png: png.into(),
    };
    value(name, Kind::Image(image))
}

pub(super) fn histogram(name: &str, histogram: Histogram) -> Value {
    let histogram = HistogramProto {
        low: histogram.low,
        high: histogram.high,
        number: histogram.number,
        sum: histogram.sum,
        sum_of_squares: histogram.sum_of_squares,
        limits: histogram.limits,
        counts: histogram.counts,
    };
    value(name, Kind::Histogram(histogram))
}
