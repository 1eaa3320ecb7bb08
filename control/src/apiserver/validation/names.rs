//! The syntax of names, labels, keys and ports, with the messages that users of Kubernetes know.
//!
//! Sources: RFC 1035, RFC 1123, RFC 6335 and the API documentation ("Object Names and IDs", "Labels and Selectors").

const LABEL: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const SUBDOMAIN: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const QUALIFIED: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const LABEL_VALUE: &str = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?";

pub(super) const LABEL_LENGTH: usize = 63;
pub(super) const SUBDOMAIN_LENGTH: usize = 253;
const PORT_NAME_LENGTH: usize = 15;

/// How the names of a kind are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    Subdomain,
    Label,
    /// A segment of a URL path.
    Segment,
    /// A subdomain that leaves room for what controllers append.
    Short(usize),
    Address,
}

impl Rule {
    /// What is wrong with a name.
    pub(super) fn check(self, name: &str) -> Vec<String> {
        match self {
            Self::Subdomain => subdomain(name),
            Self::Label => label(name),
            Self::Segment => segment(name),
            Self::Short(limit) => {
                let mut errors = subdomain(name);
                if name.len() > limit {
                    errors.push(too_long(limit));
                }
                errors
            }
            Self::Address => match name.parse::<std::net::IpAddr>() {
                Ok(address) if address.to_string() == name => Vec::new(),
                Ok(address) => vec![format!("must be in canonical form (\"{address}\")")],
                Err(_) => {
                    vec!["must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)".to_owned()]
                }
            },
        }
    }
}

fn too_long(limit: usize) -> String {
    format!("must be no more than {limit} bytes")
}

fn mismatch(what: &str, pattern: &str, examples: &[&str]) -> String {
    let mut quoted = String::new();
    for (index, example) in examples.iter().enumerate() {
        if index > 0 {
            quoted.push_str(" or ");
        }
        quoted.push_str(&format!("'{example}', "));
    }
    format!("{what} (e.g. {quoted}regex used for validation is '{pattern}')")
}

fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    bytes.first().is_some_and(edge)
        && bytes.last().is_some_and(edge)
        && bytes.iter().all(|b| edge(b) || *b == b'-')
}

fn is_subdomain(text: &str) -> bool {
    text.split('.').all(is_label)
}

fn is_qualified(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.first().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// A DNS label of RFC 1123.
pub(super) fn label(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > LABEL_LENGTH {
        errors.push(too_long(LABEL_LENGTH));
    }
    if !is_label(text) {
        errors.push(if is_subdomain(text) {
            "must not contain dots".to_owned()
        } else {
            mismatch(
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
                 start and end with an alphanumeric character",
                LABEL,
                &["my-name", "123-abc"],
            )
        });
    }
    errors
}

/// A DNS subdomain of RFC 1123.
pub(super) fn subdomain(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > SUBDOMAIN_LENGTH {
        errors.push(too_long(SUBDOMAIN_LENGTH));
    }
    if !is_subdomain(text) {
        errors.push(mismatch(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must \
             start and end with an alphanumeric character",
            SUBDOMAIN,
            &["example.com"],
        ));
    }
    errors
}

fn segment(text: &str) -> Vec<String> {
    if text == "." || text == ".." {
        return vec![format!("may not be '{text}'")];
    }
    ["/", "%"]
        .iter()
        .filter(|c| text.contains(**c))
        .map(|c| format!("may not contain '{c}'"))
        .collect()
}

/// The key of a label or annotation: an optional DNS prefix and a name.
pub(super) fn qualified(text: &str) -> Vec<String> {
    let what = "consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric \
                character";
    let mut errors = Vec::new();
    let name = match text.split_once('/') {
        Some((_, name)) if name.contains('/') => {
            return vec![format!(
                "a valid label key must {} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')",
                mismatch(what, QUALIFIED, &["MyName", "my.name", "123-abc"])
            )];
        }
        Some(("", name)) => {
            errors.push("prefix part must be non-empty".to_owned());
            name
        }
        Some((prefix, name)) => {
            errors.extend(
                subdomain(prefix)
                    .into_iter()
                    .map(|e| format!("prefix part {e}")),
            );
            name
        }
        None => text,
    };
    if name.is_empty() {
        errors.push("name part must be non-empty".to_owned());
    } else if name.len() > LABEL_LENGTH {
        errors.push(format!("name part {}", too_long(LABEL_LENGTH)));
    }
    if !is_qualified(name) {
        errors.push(format!(
            "name part must {}",
            mismatch(what, QUALIFIED, &["MyName", "my.name", "123-abc"])
        ));
    }
    errors
}

/// The value of a label.
pub(super) fn label_value(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > LABEL_LENGTH {
        errors.push(too_long(LABEL_LENGTH));
    }
    if !text.is_empty() && !is_qualified(text) {
        errors.push(mismatch(
            "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must \
             start and end with an alphanumeric character",
            LABEL_VALUE,
            &["MyValue", "my_value", "12345"],
        ));
    }
    errors
}

/// A key of a ConfigMap or Secret.
pub(super) fn data_key(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > SUBDOMAIN_LENGTH {
        errors.push(too_long(SUBDOMAIN_LENGTH));
    }
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    if text.is_empty() || !text.bytes().all(plain) {
        errors.push(mismatch(
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.'",
            "[-._a-zA-Z0-9]+",
            &["key.name", "KEY_NAME", "key-name"],
        ));
    } else if text == "." || text == ".." {
        errors.push(format!("must not be '{text}'"));
    } else if text.starts_with("..") {
        errors.push("must not start with '..'".to_owned());
    }
    errors
}

/// The name of a port: an IANA service name.
pub(super) fn port_name(text: &str) -> Vec<String> {
    let mut errors = Vec::new();
    if text.len() > PORT_NAME_LENGTH {
        errors.push(too_long(PORT_NAME_LENGTH));
    }
    if text.is_empty()
        || !text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    {
        errors.push(
            "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".to_owned(),
        );
    }
    if !text.bytes().any(|b| b.is_ascii_lowercase()) {
        errors.push("must contain at least one letter (a-z)".to_owned());
    }
    if text.contains("--") {
        errors.push("must not contain consecutive hyphens".to_owned());
    }
    if text.starts_with('-') || text.ends_with('-') {
        errors.push("must not begin or end with a hyphen".to_owned());
    }
    errors
}

/// The name of an environment variable.
pub(super) fn environment_name(text: &str) -> Vec<String> {
    if text
        .bytes()
        .all(|b| (b' '..=b'~').contains(&b) && b != b'=')
    {
        Vec::new()
    } else {
        vec!["a valid environment variable name must consist only of printable ASCII characters other than '='".into()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_by_rule() {
        for (rule, good, bad) in [
            (
                Rule::Subdomain,
                &["a", "a.b-c.0"][..],
                &["", "A", "under_score", "-dash", "a..b", "a."][..],
            ),
            (Rule::Label, &["a", "0-a"][..], &["a.b", "a-", ""][..]),
            (
                Rule::Segment,
                &["system:Odd_Name", "..."][..],
                &[".", "..", "a/b", "a%b"][..],
            ),
            (
                Rule::Address,
                &["10.0.0.1", "fd00::1"][..],
                &["10.0.0", "fd00:0::1"][..],
            ),
            (Rule::Short(3), &["abc"][..], &["abcd"][..]),
        ] {
            for name in good {
                assert_eq!(rule.check(name), Vec::<String>::new(), "{rule:?} {name}");
            }
            for name in bad {
                assert!(!rule.check(name).is_empty(), "{rule:?} {name}");
            }
        }
        assert!(Rule::Subdomain.check(&"a".repeat(253)).is_empty());
        assert!(!Rule::Subdomain.check(&"a".repeat(254)).is_empty());
        assert_eq!(label("a.b"), ["must not contain dots"]);
        assert_eq!(
            subdomain("Upper"),
            [
                "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must \
              start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
              '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
            ]
        );
    }

    #[test]
    fn labels_keys_and_ports() {
        for key in ["k", "example.com/x_Y.z", "a.b/c"] {
            assert!(qualified(key).is_empty(), "{key}");
        }
        for key in ["", "a/b/c", "/a", "A_/b", "bad key", "-x", "a/"] {
            assert!(!qualified(key).is_empty(), "{key}");
        }
        assert!(label_value("").is_empty() && label_value("A-1_b.c").is_empty());
        assert!(!label_value("has space").is_empty() && !label_value("-x").is_empty());
        assert!(port_name("http-1").is_empty());
        for name in ["", "123", "a--b", "-a", "UPPER", "abcdefghijklmnop"] {
            assert!(!port_name(name).is_empty(), "{name}");
        }
        assert!(data_key("a.b_c-D").is_empty());
        for key in ["", "bad key", "..", "..x"] {
            assert!(!data_key(key).is_empty(), "{key}");
        }
    }
}
