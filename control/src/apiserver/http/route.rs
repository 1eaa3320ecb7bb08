//! Paths and methods to what is asked. Pure.

use http::Method;

/// What a path names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// `/healthz`, `/livez`, `/readyz` and single checks below them.
    Health {
        check: String,
    },
    Version,
    /// `/api`
    LegacyVersions,
    /// `/apis`
    Groups,
    /// `/apis/GROUP`
    Group {
        group: String,
    },
    /// `/api/v1`, `/apis/GROUP/VERSION`
    Resources {
        group: String,
        version: String,
    },
    OpenApiV2,
    OpenApiV3Index,
    OpenApiV3 {
        path: String,
    },
    Metrics,
    /// `/debug/compact`: forget history, for operators and tests.
    Compact,
    Resource(ResourcePath),
    Unknown,
}

/// A path to a collection, an object or a subresource. Empty parts are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ResourcePath {
    pub(super) group: String,
    pub(super) version: String,
    pub(super) namespace: String,
    pub(super) plural: String,
    pub(super) name: String,
    pub(super) subresource: String,
    /// The deprecated `/watch/` prefix.
    pub(super) watch: bool,
}

/// Subresources of namespaces: `namespaces/NS/status` is not a collection in a namespace.
const NAMESPACE_SUBRESOURCES: [&str; 2] = ["status", "finalize"];

pub(super) fn parse(path: &str) -> Route {
    let decoded: Option<Vec<String>> = path
        .trim_matches('/')
        .split('/')
        .map(percent_decode)
        .collect();
    let Some(parts) = decoded else {
        return Route::Unknown;
    };
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    match parts.as_slice() {
        [check @ ("healthz" | "livez" | "readyz"), ..] => Route::Health {
            check: (*check).into(),
        },
        ["version"] => Route::Version,
        ["debug", "compact"] => Route::Compact,
        ["metrics"] => Route::Metrics,
        ["api"] => Route::LegacyVersions,
        ["apis"] => Route::Groups,
        ["apis", group] => Route::Group {
            group: (*group).into(),
        },
        ["api", version] => Route::Resources {
            group: String::new(),
            version: (*version).into(),
        },
        ["apis", group, version] => Route::Resources {
            group: (*group).into(),
            version: (*version).into(),
        },
        ["openapi", "v2"] => Route::OpenApiV2,
        ["openapi", "v3"] => Route::OpenApiV3Index,
        ["openapi", "v3", rest @ ..] => Route::OpenApiV3 {
            path: rest.join("/"),
        },
        ["api", version, rest @ ..] => resource("", version, rest),
        ["apis", group, version, rest @ ..] => resource(group, version, rest),
        _ => Route::Unknown,
    }
}

fn resource(group: &str, version: &str, rest: &[&str]) -> Route {
    let (watch, rest) = match rest {
        ["watch", rest @ ..] => (true, rest),
        _ => (false, rest),
    };
    let (namespace, rest) = match rest {
        ["namespaces", _] => ("", rest),
        ["namespaces", _, sub] if NAMESPACE_SUBRESOURCES.contains(sub) => ("", rest),
        ["namespaces", namespace, rest @ ..] => (*namespace, rest),
        _ => ("", rest),
    };
    let (plural, name, subresource) = match rest {
        [plural] => (*plural, "", ""),
        [plural, name] => (*plural, *name, ""),
        [plural, name, subresource] => (*plural, *name, *subresource),
        _ => return Route::Unknown,
    };
    if plural.is_empty() {
        return Route::Unknown;
    }
    Route::Resource(ResourcePath {
        group: group.into(),
        version: version.into(),
        namespace: namespace.into(),
        plural: plural.into(),
        name: name.into(),
        subresource: subresource.into(),
        watch,
    })
}

/// `None` for broken escapes and text that is not UTF-8.
pub(super) fn percent_decode(text: &str) -> Option<String> {
    if !text.contains('%') {
        return Some(text.to_owned());
    }
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let (high, low) = (bytes.next()?, bytes.next()?);
        let digit = |b: u8| char::from(b).to_digit(16);
        out.push(u8::try_from(digit(high)? * 16 + digit(low)?).ok()?);
    }
    String::from_utf8(out).ok()
}

/// A query string's pairs, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Query {
    pairs: Vec<(String, String)>,
}

impl Query {
    pub(super) fn parse(query: Option<&str>) -> Self {
        let decode = |text: &str| percent_decode(&text.replace('+', " "));
        let pairs = query
            .unwrap_or_default()
            .split('&')
            .filter(|p| !p.is_empty());
        let pairs = pairs.filter_map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Some((decode(key)?, decode(value)?))
        });
        Self {
            pairs: pairs.collect(),
        }
    }

    /// The first value; empty counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.pairs
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, v)| v.as_str())
            .filter(|v| !v.is_empty())
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.pairs.iter().any(|(k, _)| k == key)
    }

    pub(super) fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.pairs
            .iter()
            .filter(move |(k, _)| k == key)
            .map(|(_, v)| v.as_str())
    }

    /// One more term for `fieldSelector`.
    pub(super) fn add_field_selector(&mut self, term: &str) {
        match self.pairs.iter_mut().find(|(k, _)| k == "fieldSelector") {
            Some((_, selector)) if !selector.is_empty() => {
                selector.push(',');
                selector.push_str(term);
            }
            Some((_, selector)) => term.clone_into(selector),
            None => self.pairs.push(("fieldSelector".into(), term.into())),
        }
    }

    /// As the server's own conversion reads flags: everything but 0 and false is true.
    pub(super) fn flag(&self, key: &str) -> bool {
        self.pairs
            .iter()
            .find(|(k, _)| k == key)
            .is_some_and(|(_, v)| !matches!(v.to_ascii_lowercase().as_str(), "0" | "false"))
    }
}

/// The verb of a request, as authorization and messages name it.
pub(super) fn verb(method: &Method, path: &ResourcePath, watch: bool) -> &'static str {
    match *method {
        Method::GET | Method::HEAD if watch => "watch",
        Method::GET | Method::HEAD if path.name.is_empty() => "list",
        Method::GET | Method::HEAD => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE if path.name.is_empty() => "deletecollection",
        Method::DELETE => "delete",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> ResourcePath {
        match parse(text) {
            Route::Resource(path) => path,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn every_shape_of_resource_path() {
        let p = path("/api/v1/namespaces/ns/pods/a%2eb/log");
        assert_eq!(
            (&*p.namespace, &*p.plural, &*p.name, &*p.subresource),
            ("ns", "pods", "a.b", "log")
        );
        let p = path("/apis/apps/v1/deployments");
        assert_eq!(
            (&*p.group, &*p.namespace, &*p.plural),
            ("apps", "", "deployments")
        );
        let p = path("/api/v1/namespaces/ns");
        assert_eq!(
            (&*p.namespace, &*p.plural, &*p.name),
            ("", "namespaces", "ns")
        );
        let p = path("/api/v1/namespaces/ns/finalize");
        assert_eq!(
            (&*p.plural, &*p.name, &*p.subresource),
            ("namespaces", "ns", "finalize")
        );
        let p = path("/api/v1/namespaces/ns/events");
        assert_eq!((&*p.namespace, &*p.plural, &*p.name), ("ns", "events", ""));
    }

    #[test]
    fn what_is_no_path_is_unknown() {
        for bad in [
            "/api/v1/namespaces/ns/pods/p/log/x",
            "/other",
            "/api/v1/pods/%zz",
            "/",
        ] {
            assert_eq!(parse(bad), Route::Unknown, "{bad}");
        }
    }

    #[test]
    fn queries_are_decoded() {
        let q = Query::parse(Some("labelSelector=a%3Db&watch=1&empty=&x=a+b"));
        assert_eq!(q.get("labelSelector"), Some("a=b"));
        assert!(q.flag("watch") && !q.flag("follow"));
        assert_eq!(
            (q.get("empty"), q.has("empty"), q.get("x")),
            (None, true, Some("a b"))
        );
    }
}
