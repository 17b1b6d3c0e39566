//! A configuration in a variable: JSON in base64 with the letters for addresses (RFC 4648, section 5), which Accelerate
//! reads where it expects the name of a file, so that ranks of both kinds get what is in no file of its own.

use std::fmt::Write;

const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Encodes a text.
pub(crate) fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len().div_ceil(3) * 4);
    for group in text.as_bytes().chunks(3) {
        let bits = (0..3).fold(0, |bits, at| bits << 8 | u32::from(group.get(at).copied().unwrap_or(0)));
        for at in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * at) & 63) as usize];
            let _ = encoded.write_char(if at <= group.len() { char::from(letter) } else { '=' });
        }
    }
    encoded
}

/// Decodes what [`encoded`] makes; `None` where a text is nothing of the kind.
pub(super) fn decoded(text: &str) -> Option<String> {
    let letters = text.trim_end_matches('=').bytes();
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for letter in letters {
        let value = LETTERS.iter().position(|known| *known == letter)?;
        bits = bits << 6 | u32::try_from(value).ok()?;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count & 255) as u8);
        }
        bits &= (1 << count) - 1;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_encoded_as_rfc_4648_says() {
        // Its own test vectors.
        let vectors = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ];
        for (text, code) in vectors {
            assert_eq!(encoded(text), code);
            assert_eq!(decoded(code).as_deref(), Some(text));
        }
        assert_eq!(encoded("ü?>~"), "w7w_Pn4=");
        assert_eq!(decoded("w7w_Pn4=").as_deref(), Some("ü?>~"));
    }

    #[test]
    fn what_is_no_code_is_not_decoded() {
        assert_eq!(decoded("ds_config.json"), None);
        assert_eq!(decoded("/a/b"), None);
    }
}
