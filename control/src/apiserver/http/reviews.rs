//! Reviews: questions about identities and rights that are answered and not stored.

use serde_json::{Value, json};

use super::authn::Identity;
use super::call::Call;
use super::negotiate::Endpoint;
use super::params;
use super::respond::{self, Answer};
use crate::apiserver::codec;
use crate::apiserver::registry::ResourceDef;
use crate::pki::ADMIN_GROUP;

/// Groups whose resources are reviews.
pub(super) const GROUPS: [&str; 2] = ["authentication.k8s.io", "authorization.k8s.io"];

pub(super) async fn review(def: &ResourceDef, mut call: Call) -> Answer {
    let form = call.form(Endpoint::Object)?;
    let options = params::write_options("CreateOptions", &call.query, call.user_agent())?;
    let format = call.body_format()?;
    let body = call.read_body().await?;
    let decoded = codec::decode_object(format, &body, def.gvk(), options.validation)?;
    let mut review = decoded.object;
    review["status"] = status(&def.kind, &review, &call.identity);
    if review["metadata"].is_null() {
        review["metadata"] = json!({});
    }
    let answer = respond::value(201, form.media, &review)?;
    Ok(respond::warn(answer, &decoded.warnings))
}

fn status(kind: &str, review: &Value, identity: &Identity) -> Value {
    match kind {
        "SelfSubjectReview" => {
            let mut user = json!({"username": identity.user, "groups": identity.groups});
            if !identity.uid.is_empty() {
                user["uid"] = json!(identity.uid);
            }
            json!({"userInfo": user})
        }
        // No tokens are issued, so none is valid.
        "TokenReview" => json!({"authenticated": false, "user": {}}),
        "SelfSubjectAccessReview" => json!({"allowed": identity.is_admin()}),
        "SelfSubjectRulesReview" => rules(identity.is_admin()),
        _ => {
            let groups = review["spec"]["groups"].as_array();
            let admin = groups.is_some_and(|g| g.iter().any(|g| g == ADMIN_GROUP));
            json!({"allowed": admin})
        }
    }
}

fn rules(admin: bool) -> Value {
    let (resources, paths) = if admin {
        (
            json!([{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]),
            json!([{"verbs": ["*"], "nonResourceURLs": ["*"]}]),
        )
    } else {
        (json!([]), json!([]))
    };
    json!({"resourceRules": resources, "nonResourceRules": paths, "incomplete": false})
}
