//! The variables that are set, of those that matter to Sconce.

use std::ffi::OsString;

use sconce_collectives::environment::{self as collectives, SCONCE_STORE_SECRET};
use sconce_core::environment::{self as core, MLFLOW_TRACKING_TOKEN, MLFLOW_TRACKING_URI};

/// Those that what Sconce is made of reads.
const OF_OTHERS: [&str; 8] = [
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "RUST_LOG",
];

/// Returns names and values of those that are set. A secret is not told: reports are read by everybody.
pub(super) fn that_are_set(lookup: impl Fn(&str) -> Option<OsString>) -> Vec<(&'static str, String)> {
    let names = [collectives::ALL, core::ALL, &OF_OTHERS].into_iter().flatten();
    let value = |name: &&'static str| {
        let value = lookup(name)?;
        let told = match *name {
            // An address may have a password in it.
            SCONCE_STORE_SECRET | MLFLOW_TRACKING_TOKEN | MLFLOW_TRACKING_URI => "(set, and not shown)".into(),
            _ => value.to_string_lossy(),
        };
        Some((*name, told.into_owned()))
    };
    names.filter_map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_told_and_what_is_not_set_is_left_out() {
        let set = that_are_set(|name| match name {
            "SCONCE_STORE_SECRET" => Some("sixteen characters".into()),
            "OMP_NUM_THREADS" => Some("3".into()),
            "MLFLOW_TRACKING_URI" => Some("https://me:password@host".into()),
            "MLFLOW_TRACKING_TOKEN" => Some("token".into()),
            _ => None,
        });
        let expected = [
            ("SCONCE_STORE_SECRET", "(set, and not shown)"),
            ("MLFLOW_TRACKING_URI", "(set, and not shown)"),
            ("MLFLOW_TRACKING_TOKEN", "(set, and not shown)"),
            ("OMP_NUM_THREADS", "3"),
        ];
        assert_eq!(set, expected.map(|(name, value)| (name, value.to_owned())));
    }
}
