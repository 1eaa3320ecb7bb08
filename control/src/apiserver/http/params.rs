//! Query parameters of reads and writes, checked as the reference server checks them. Pure.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use super::route::Query;
use crate::apiserver::api::{ListQuery, Warnings, WriteOptions};
use crate::apiserver::codec::FieldValidation;
use crate::apiserver::registry::ResourceDef;
use crate::apiserver::selector::{FieldSelector, LabelSelector};
use crate::status::{ApiError, Cause};

/// Longest field manager.
const MANAGER_CHARS: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Match {
    Exact,
    NotOlderThan,
}

/// Parameters of list and watch.
#[derive(Clone, Debug)]
pub(super) struct ReadParams {
    pub(super) list: ListQuery,
    /// `None` when unset or 0.
    pub(super) revision: Option<u64>,
    pub(super) matching: Option<Match>,
    pub(super) bookmarks: bool,
    pub(super) initial_events: bool,
    pub(super) timeout_s: Option<u64>,
    /// The continue token asks for what is there now.
    pub(super) inconsistent: bool,
}

fn cause(reason: &'static str, field: &str, message: impl Into<String>) -> Cause {
    Cause {
        reason,
        message: message.into(),
        field: field.into(),
    }
}

fn invalid_options(kind: &str, causes: Vec<Cause>) -> ApiError {
    ApiError::invalid("meta.k8s.io", kind, "", causes)
}

fn number<T: std::str::FromStr>(query: &Query, key: &str) -> Result<Option<T>, ApiError> {
    query.get(key).map_or(Ok(None), |text| match text.parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(ApiError::bad_request(format!(
            "query parameter {key}={text:?} is not a number"
        ))),
    })
}

impl ReadParams {
    pub(super) fn parse(def: &ResourceDef, query: &Query, watch: bool) -> Result<Self, ApiError> {
        let labels = LabelSelector::parse(query.get("labelSelector").unwrap_or_default())?;
        let fields = FieldSelector::parse(
            query.get("fieldSelector").unwrap_or_default(),
            def.field_labels,
        )?;
        let limit = number::<usize>(query, "limit")?.unwrap_or(0);
        let given = number::<u64>(query, "resourceVersion")?;
        let token = query.get("continue");
        check_versions(query, given, token.is_some(), watch)?;
        let matching = match query.get("resourceVersionMatch") {
            Some("Exact") => Some(Match::Exact),
            Some("NotOlderThan") => Some(Match::NotOlderThan),
            _ => None,
        };
        let mut params = Self {
            list: ListQuery {
                labels,
                fields,
                limit,
                after: None,
                at: None,
            },
            revision: given.filter(|r| *r > 0),
            matching,
            bookmarks: query.flag("allowWatchBookmarks"),
            initial_events: query.flag("sendInitialEvents"),
            timeout_s: number(query, "timeoutSeconds")?,
            inconsistent: false,
        };
        if let Some(token) = token.filter(|_| !watch) {
            let (revision, key) = read_token(token)?;
            params.list.after = Some(key);
            params.list.at = revision;
            params.inconsistent = revision.is_none();
        } else if let Some(revision) = params.revision {
            let exact = matching == Some(Match::Exact) || (matching.is_none() && limit > 0);
            params.list.at = (exact && !watch).then_some(revision);
        }
        Ok(params)
    }
}

/// Rules between resourceVersion, resourceVersionMatch, continue and sendInitialEvents.
fn check_versions(
    query: &Query,
    given: Option<u64>,
    continued: bool,
    watch: bool,
) -> Result<(), ApiError> {
    const MATCH: &str = "resourceVersionMatch";
    let matching = query.get(MATCH);
    let mut causes = Vec::new();
    let forbidden =
        |field, why: &str| cause("FieldValueForbidden", field, format!("Forbidden: {why}"));
    if query.has("sendInitialEvents") {
        if !watch {
            causes.push(forbidden(
                "sendInitialEvents",
                "sendInitialEvents is forbidden for list",
            ));
        } else if matching != Some("NotOlderThan") {
            let why = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
            causes.push(forbidden(MATCH, why));
        }
    } else if watch && matching.is_some() {
        let why =
            "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
        causes.push(forbidden(MATCH, why));
    }
    if let Some(matching) = matching.filter(|_| !watch) {
        if continued {
            causes.push(forbidden(
                MATCH,
                "resourceVersionMatch is forbidden when continue is provided",
            ));
        } else if given.is_none() {
            let why = "resourceVersionMatch is forbidden unless resourceVersion is provided";
            causes.push(forbidden(MATCH, why));
        }
        if !matches!(matching, "Exact" | "NotOlderThan") {
            let message = format!(
                "Unsupported value: {matching:?}: supported values: \"Exact\", \"NotOlderThan\", \"\""
            );
            causes.push(cause("FieldValueNotSupported", MATCH, message));
        } else if matching == "Exact" && given == Some(0) {
            let why = "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"";
            causes.push(forbidden(MATCH, why));
        }
    }
    if !causes.is_empty() {
        return Err(invalid_options("ListOptions", causes));
    }
    if continued && !watch && given.is_some_and(|r| r > 0) {
        return Err(ApiError::bad_request(
            "specifying resource version is not allowed when using continue",
        ));
    }
    Ok(())
}

/// The token behind which a list goes on after `key`; without a revision it goes on at the present.
pub(super) fn write_token(revision: Option<u64>, key: &str) -> String {
    URL_SAFE_NO_PAD.encode(json!({"v": "weir/v1", "rv": revision, "after": key}).to_string())
}

fn read_token(token: &str) -> Result<(Option<u64>, String), ApiError> {
    let bad = || ApiError::bad_request("continue key is not valid: it was not made by this server");
    let decoded = URL_SAFE_NO_PAD.decode(token).map_err(|_| bad())?;
    let value: Value = serde_json::from_slice(&decoded).map_err(|_| bad())?;
    if value["v"] != "weir/v1" {
        return Err(bad());
    }
    let key = value["after"].as_str().ok_or_else(bad)?;
    Ok((value["rv"].as_u64(), key.to_owned()))
}

/// Options of create, update and patch (`kind` names them in messages).
pub(super) fn write_options(
    kind: &str,
    query: &Query,
    user_agent: &str,
) -> Result<WriteOptions, ApiError> {
    let dry_run = dry_run(kind, query.all("dryRun"))?;
    let validation = match query.get("fieldValidation") {
        None | Some("Warn") => FieldValidation::Warn,
        Some("Ignore") => FieldValidation::Ignore,
        Some("Strict") => FieldValidation::Strict,
        Some(other) => {
            let message = format!(
                "Unsupported value: {other:?}: supported values: \"\", \"Ignore\", \"Strict\", \"Warn\""
            );
            let cause = cause("FieldValueNotSupported", "fieldValidation", message);
            return Err(invalid_options(kind, vec![cause]));
        }
    };
    let manager = match query.get("fieldManager") {
        Some(given) => given.to_owned(),
        None => user_agent.split('/').next().unwrap_or_default().to_owned(),
    };
    if manager.chars().count() > MANAGER_CHARS {
        let message = format!("Too long: may not be more than {MANAGER_CHARS} bytes");
        let cause = cause("FieldValueTooLong", "fieldManager", message);
        return Err(invalid_options(kind, vec![cause]));
    }
    Ok(WriteOptions {
        dry_run,
        manager,
        validation,
        warnings: Warnings::default(),
    })
}

/// `dryRun` knows one value.
pub(super) fn dry_run<'a>(
    kind: &str,
    mut values: impl Iterator<Item = &'a str>,
) -> Result<bool, ApiError> {
    let Some(first) = values.next().filter(|v| !v.is_empty()) else {
        return Ok(false);
    };
    if first == "All" {
        return Ok(true);
    }
    let message = format!("Unsupported value: {first:?}: supported values: \"All\"");
    Err(invalid_options(
        kind,
        vec![cause("FieldValueNotSupported", "dryRun", message)],
    ))
}

/// Server-side apply needs a manager of its own, and force belongs to it alone.
pub(super) fn check_apply(query: &Query, apply: bool) -> Result<(), ApiError> {
    let mut causes = Vec::new();
    if apply && query.get("fieldManager").is_none() {
        let message = "Required value: is required for apply patch";
        causes.push(cause("FieldValueRequired", "fieldManager", message));
    }
    if !apply && query.has("force") {
        let message = "Forbidden: may not be specified for non-apply patch";
        causes.push(cause("FieldValueForbidden", "force", message));
    }
    if causes.is_empty() {
        Ok(())
    } else {
        Err(invalid_options("PatchOptions", causes))
    }
}

/// `propagationPolicy` with a value that does not exist.
pub(super) fn bad_propagation(given: &str) -> ApiError {
    let message = format!(
        "Unsupported value: {given:?}: supported values: \"Background\", \"Foreground\", \"Orphan\""
    );
    let cause = cause("FieldValueNotSupported", "propagationPolicy", message);
    invalid_options("DeleteOptions", vec![cause])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::registry::Registry;

    fn code(query: &str, watch: bool) -> u16 {
        let registry = Registry::builtin();
        let def = registry.find("", "v1", "secrets").unwrap();
        match ReadParams::parse(def, &Query::parse(Some(query)), watch) {
            Ok(_) => 200,
            Err(e) => e.code,
        }
    }

    #[test]
    fn contradictions_are_refused() {
        assert_eq!(code("limit=1&continue=garbage", false), 400);
        assert_eq!(code("limit=many", false), 400);
        assert_eq!(code("resourceVersionMatch=Exact", false), 422);
        assert_eq!(
            code("resourceVersionMatch=Exact&resourceVersion=0", false),
            422
        );
        assert_eq!(
            code("resourceVersionMatch=Roughly&resourceVersion=5", false),
            422
        );
        assert_eq!(code("sendInitialEvents=true", false), 422);
        assert_eq!(code("sendInitialEvents=true", true), 422);
        assert_eq!(
            code(
                "sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
                true
            ),
            200
        );
        let token = write_token(Some(7), "core/secrets/a/b");
        assert_eq!(code(&format!("continue={token}"), false), 200);
        assert_eq!(
            code(&format!("continue={token}&resourceVersion=5"), false),
            400
        );
    }
}
