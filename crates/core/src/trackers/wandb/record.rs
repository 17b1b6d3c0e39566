//! The messages of an offline run, as far as it has them.
//!
//! Source: `wandb/proto/wandb_internal.proto` of Weights & Biases' client; fields are theirs by number.

use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(super) struct Record {
    /// Which record of the file it is, from 1.
    #[prost(int64, tag = "1")]
    pub(super) number: i64,
    #[prost(oneof = "Kind", tags = "2, 3, 6, 17, 18, 21")]
    pub(super) kind: Option<Kind>,
    #[prost(message, optional, tag = "200")]
    pub(super) info: Option<Info>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Kind {
    #[prost(message, tag = "2")]
    History(History),
    #[prost(message, tag = "3")]
    Summary(Updates),
    #[prost(message, tag = "6")]
    Files(Files),
    #[prost(message, tag = "17")]
    Run(Run),
    #[prost(message, tag = "18")]
    Exit(Exit),
    #[prost(message, tag = "21")]
    Header(Header),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Info {
    /// The run that a record belongs to.
    #[prost(string, tag = "1")]
    pub(super) stream: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(message, optional, tag = "1")]
    pub(super) version: Option<Version>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Version {
    #[prost(string, tag = "1")]
    pub(super) producer: String,
    #[prost(string, tag = "2")]
    pub(super) least_consumer: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Run {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(string, tag = "3")]
    pub(super) project: String,
    #[prost(message, optional, tag = "4")]
    pub(super) config: Option<Updates>,
    #[prost(string, tag = "13")]
    pub(super) host: String,
    #[prost(message, optional, tag = "17")]
    pub(super) start: Option<Timestamp>,
}

/// `google.protobuf.Timestamp`: time since 1970.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Timestamp {
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(super) nanoseconds: i32,
}

/// New values, of the configuration or of the summary.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Updates {
    #[prost(message, repeated, tag = "1")]
    pub(super) items: Vec<Item>,
}

/// The values of one step.
#[derive(Clone, PartialEq, Message)]
pub(super) struct History {
    #[prost(message, repeated, tag = "1")]
    pub(super) items: Vec<Item>,
    #[prost(message, optional, tag = "2")]
    pub(super) step: Option<Step>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Step {
    #[prost(int64, tag = "1")]
    pub(super) number: i64,
}

/// A value by its name: `key`, or `nested_key`, where it lies within another.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Item {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, repeated, tag = "2")]
    pub(super) nested_key: Vec<String>,
    /// JSON, with `NaN`, `Infinity` and `-Infinity`.
    #[prost(string, tag = "16")]
    pub(super) value: String,
}

/// Files of the run that are to be uploaded with it.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Files {
    #[prost(message, repeated, tag = "1")]
    pub(super) files: Vec<FileItem>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct FileItem {
    /// Relative to the run's folder `files`.
    #[prost(string, tag = "1")]
    pub(super) path: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Exit {
    #[prost(int32, tag = "1")]
    pub(super) code: i32,
    /// In seconds.
    #[prost(int32, tag = "2")]
    pub(super) runtime: i32,
}
