//! Reviews: questions about identities and rights that are answered and not stored.

use serde_json::{Value, json};

use super::authn::Identity;
use super::call::Call;
use super::negotiate::Endpoint;
use super::params;
use super::respond::{self, Answer};
use crate::apiserver::api::Api;
use crate::apiserver::codec;
use crate::apiserver::registry::ResourceDef;
use crate::pki::ADMIN_GROUP;
use crate::status::ApiError;

/// Groups whose resources are reviews.
pub(super) const GROUPS: [&str; 2] = ["authentication.k8s.io", "authorization.k8s.io"];

pub(super) async fn review(api: &Api, def: &ResourceDef, mut call: Call) -> Answer {
    let form = call.form(Endpoint::Object)?;
    let options = params::write_options("CreateOptions", &call.query, call.user_agent())?;
    let format = call.body_format()?;
    let body = call.read_body().await?;
    let decoded = codec::decode_object(format, &body, def.gvk(), options.validation)?;
    let mut review = decoded.object;
    review["status"] = if def.kind == "TokenReview" {
        token_status(api, &review).await?
    } else {
        status(&def.kind, &review, &call.identity)
    };
    if review["metadata"].is_null() {
        review["metadata"] = json!({});
    }
    let answer = respond::value(201, form.media, &review)?;
    Ok(respond::warn(answer, &decoded.warnings))
}

async fn token_status(api: &Api, review: &Value) -> Result<Value, ApiError> {
    let audiences = review["spec"]["audiences"].as_array();
    let audiences: Vec<&str> = audiences
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let token = review["spec"]["token"].as_str().unwrap_or_default();
    Ok(match api.authenticate_token(token, &audiences).await? {
        Some(user) => json!({"authenticated": true, "audiences": audiences,
            "user": {"username": user.name, "uid": user.uid, "groups": user.groups}}),
        None => json!({"authenticated": false, "user": {}}),
    })
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
