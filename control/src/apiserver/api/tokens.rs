//! Tokens of service accounts: issued for an account (and an object it is bound to), good while both exist.

use serde_json::{Value, json};

use super::{Api, check_uid, invalid, no_such_path, now};
use crate::apiserver::object::{self, map_mut, rfc3339, text};
use crate::apiserver::registry::Gvk;
use crate::apiserver::tokens::Tokens;
use crate::status::{ApiError, Cause};

/// Seconds that a token lives unless the request says otherwise, and the bounds of what it may say.
const DEFAULT_S: i64 = 3600;
const SHORTEST_S: i64 = 600;
const LONGEST_S: i64 = 1 << 32;

/// Whom a token stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenUser {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
}

impl Api {
    /// Connects the signing key. The first call counts.
    pub fn set_tokens(&self, tokens: Tokens) {
        let _ = self.tokens.set(tokens);
    }

    /// The `token` subresource of a service account: the request with its status filled.
    ///
    /// # Errors
    /// 404 for an account or bound object that is not there, 409 for another uid, 422 for a lifetime out of bounds.
    pub async fn issue_token(
        &self,
        namespace: &str,
        name: &str,
        mut request: Value,
    ) -> Result<Value, ApiError> {
        let tokens = self.tokens.get().ok_or_else(no_such_path)?;
        let def = self.resource("", "v1", "serviceaccounts")?;
        let account = self.get(&def, namespace, name).await?;
        check_uid(&def, text(&request, "/metadata/uid"), &account)?;
        let life = lifetime(name, &request)?;
        let bound = self.bound_object(namespace, &request).await?;
        let mut identity = json!({
            "namespace": namespace,
            "serviceaccount": {"name": name, "uid": account["metadata"]["uid"]},
        });
        if let Some((kind, object)) = bound {
            identity[kind] =
                json!({"name": object["metadata"]["name"], "uid": object["metadata"]["uid"]});
        }
        let mut audiences = request["spec"]["audiences"].clone();
        if audiences.as_array().is_none_or(Vec::is_empty) {
            audiences = json!([tokens.issuer()]);
        }
        let begin = now().as_second();
        let claims = json!({
            "iss": tokens.issuer(), "aud": audiences, "sub": user_name(namespace, name),
            "iat": begin, "nbf": begin, "exp": begin + life,
            "jti": uuid::Uuid::new_v4().to_string(), "kubernetes.io": identity,
        });
        let token = tokens.sign(&claims).ok_or_else(|| {
            ApiError::new(
                500,
                "InternalError",
                "Internal error occurred: the token key cannot sign",
            )
        })?;
        let expires = jiff::Timestamp::from_second(begin + life).unwrap_or(jiff::Timestamp::MAX);
        let spec = map_mut(&mut request, "spec")?;
        spec.insert("audiences".into(), audiences);
        spec.insert("expirationSeconds".into(), life.into());
        let metadata = map_mut(&mut request, "metadata")?;
        metadata.insert("name".into(), name.into());
        metadata.insert("namespace".into(), namespace.into());
        metadata.insert("creationTimestamp".into(), rfc3339(now()).into());
        request["status"] = json!({"token": token, "expirationTimestamp": rfc3339(expires)});
        Ok(request)
    }

    /// The pod or secret that a token is to die with, under its name in claims.
    async fn bound_object(
        &self,
        namespace: &str,
        request: &Value,
    ) -> Result<Option<(&'static str, std::sync::Arc<Value>)>, ApiError> {
        let reference = &request["spec"]["boundObjectRef"];
        let (claim, plural) = match text(reference, "/kind") {
            "" => return Ok(None),
            "Pod" => ("pod", "pods"),
            "Secret" => ("secret", "secrets"),
            other => {
                return Err(ApiError::bad_request(format!(
                    "cannot bind token for object of type {other}: use Pod or Secret"
                )));
            }
        };
        let def = self.resource("", "v1", plural)?;
        let object = self.get(&def, namespace, text(reference, "/name")).await?;
        check_uid(&def, text(reference, "/uid"), &object)?;
        Ok(Some((claim, object)))
    }

    /// Whom a bearer token stands for here: `None` unless it is valid for one of `audiences` (this API when empty) and
    /// its account, and what it is bound to, are still there.
    ///
    /// # Errors
    /// Failures of the store.
    pub async fn authenticate_token(
        &self,
        token: &str,
        audiences: &[&str],
    ) -> Result<Option<TokenUser>, ApiError> {
        let Some(tokens) = self.tokens.get() else {
            return Ok(None);
        };
        let Some(claims) = tokens.verify(token, now().as_second()) else {
            return Ok(None);
        };
        let own = [tokens.issuer()];
        let wanted = if audiences.is_empty() {
            &own[..]
        } else {
            audiences
        };
        let meant = claims["aud"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str);
        if !meant.into_iter().any(|a| wanted.contains(&a)) {
            return Ok(None);
        }
        let identity = &claims["kubernetes.io"];
        let namespace = text(identity, "/namespace");
        let kinds = [
            ("serviceaccount", "serviceaccounts"),
            ("pod", "pods"),
            ("secret", "secrets"),
        ];
        for (claim, plural) in kinds {
            let part = &identity[claim];
            if part.is_null() && claim != "serviceaccount" {
                continue;
            }
            let def = self.resource("", "v1", plural)?;
            match self.get(&def, namespace, text(part, "/name")).await {
                Ok(found) if found["metadata"]["uid"] == part["uid"] => {}
                Ok(_) => return Ok(None),
                Err(e) if e.is_not_found() => return Ok(None),
                Err(e) => return Err(e),
            }
        }
        let account = &identity["serviceaccount"];
        Ok(Some(TokenUser {
            name: user_name(namespace, text(account, "/name")),
            uid: text(account, "/uid").to_owned(),
            groups: vec![
                "system:serviceaccounts".into(),
                format!("system:serviceaccounts:{namespace}"),
                "system:authenticated".into(),
            ],
        }))
    }
}

fn user_name(namespace: &str, name: &str) -> String {
    format!("system:serviceaccount:{namespace}:{name}")
}

fn lifetime(name: &str, request: &Value) -> Result<i64, ApiError> {
    let given = request["spec"]["expirationSeconds"]
        .as_i64()
        .unwrap_or(DEFAULT_S);
    let why = if given < SHORTEST_S {
        "may not specify a duration less than 10 minutes"
    } else if given > LONGEST_S {
        "may not specify a duration larger than 2^32 seconds"
    } else {
        return Ok(given);
    };
    let cause = Cause {
        reason: "FieldValueInvalid",
        message: format!("Invalid value: {given}: {why}"),
        field: "spec.expirationSeconds".into(),
    };
    let gvk = Gvk::new("authentication.k8s.io", "v1", "TokenRequest");
    let named = object::name(request);
    invalid(
        gvk,
        if named.is_empty() { name } else { named },
        vec![cause],
    )
    .map(|()| given)
}
