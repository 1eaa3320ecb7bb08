//! Who asks: client certificates of the cluster CA, service account tokens, and impersonation by administrators.

use http::HeaderMap;
use http::header::AUTHORIZATION;
use rustls_pki_types::CertificateDer;

use super::route::ResourcePath;
use crate::apiserver::api::Api;
use crate::pki::ADMIN_GROUP;
use crate::status::ApiError;

const AUTHENTICATED: &str = "system:authenticated";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) user: String,
    pub(super) groups: Vec<String>,
    pub(super) uid: String,
}

impl Identity {
    /// The subject of a certificate that the cluster CA signed: CN is the user, O are the groups.
    pub(super) fn from_certificate(der: &CertificateDer<'_>) -> Option<Self> {
        let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
        let subject = certificate.subject();
        let user = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
        let organizations = subject.iter_organization().filter_map(|o| o.as_str().ok());
        let mut groups: Vec<String> = organizations.map(str::to_owned).collect();
        groups.push(AUTHENTICATED.into());
        Some(Self {
            user,
            groups,
            uid: String::new(),
        })
    }

    pub(super) fn is_admin(&self) -> bool {
        self.groups.iter().any(|g| g == ADMIN_GROUP)
    }
}

/// The identity that a request acts as.
///
/// # Errors
/// 401 without valid credentials, 403 for impersonation by others than administrators.
pub(super) async fn authenticate(
    api: &Api,
    certificate: Option<&Identity>,
    headers: &HeaderMap,
) -> Result<Identity, ApiError> {
    let identity = match certificate {
        Some(identity) => identity.clone(),
        // A token that is not valid must not pass as an anonymous request.
        None => of_token(api, headers).await?.ok_or_else(unauthorized)?,
    };
    impersonate(identity, headers)
}

async fn of_token(api: &Api, headers: &HeaderMap) -> Result<Option<Identity>, ApiError> {
    let header = headers.get(AUTHORIZATION).and_then(|v| v.to_str().ok());
    let Some(token) = header.and_then(|h| h.strip_prefix("Bearer ")) else {
        return Ok(None);
    };
    let user = api.authenticate_token(token.trim(), &[]).await?;
    Ok(user.map(|u| Identity {
        user: u.name,
        groups: u.groups,
        uid: u.uid,
    }))
}

pub(super) fn unauthorized() -> ApiError {
    ApiError::new(401, "Unauthorized", "Unauthorized")
}

fn impersonate(identity: Identity, headers: &HeaderMap) -> Result<Identity, ApiError> {
    let header = |name: &str| {
        headers
            .get(name)
            .and_then(|v| v.to_str().ok())
            .unwrap_or_default()
    };
    let user = header("impersonate-user");
    let groups: Vec<String> = headers
        .get_all("impersonate-group")
        .iter()
        .filter_map(|v| v.to_str().ok())
        .map(str::to_owned)
        .collect();
    let uid = header("impersonate-uid");
    if user.is_empty() {
        if groups.is_empty() && uid.is_empty() {
            return Ok(identity);
        }
        return Err(ApiError::new(
            500,
            "InternalError",
            "Internal error occurred: requested groups or uid without impersonating a user",
        ));
    }
    if !identity.is_admin() {
        let message = format!(
            "users \"{user}\" is forbidden: User \"{}\" cannot impersonate resource \"users\" in API group \"\" at the cluster scope",
            identity.user
        );
        return Err(ApiError::new(403, "Forbidden", message));
    }
    let mut groups = groups;
    if !groups.iter().any(|g| g == AUTHENTICATED) {
        groups.push(AUTHENTICATED.into());
    }
    Ok(Identity {
        user: user.into(),
        groups,
        uid: uid.into(),
    })
}

/// 403 for a resource, in the words of the reference server.
pub(super) fn forbidden_resource(identity: &Identity, verb: &str, path: &ResourcePath) -> ApiError {
    let qualified = if path.group.is_empty() {
        path.plural.clone()
    } else {
        format!("{}.{}", path.plural, path.group)
    };
    let resource = if path.subresource.is_empty() {
        path.plural.clone()
    } else {
        format!("{}/{}", path.plural, path.subresource)
    };
    let scope = if path.namespace.is_empty() {
        "at the cluster scope".to_owned()
    } else {
        format!("in the namespace \"{}\"", path.namespace)
    };
    let subject = if path.name.is_empty() {
        qualified
    } else {
        format!("{qualified} \"{}\"", path.name)
    };
    let message = format!(
        "{subject} is forbidden: User \"{}\" cannot {verb} resource \"{resource}\" in API group \"{}\" {scope}",
        identity.user, path.group
    );
    let mut error = ApiError::new(403, "Forbidden", message);
    error.details.name.clone_from(&path.name);
    error.details.group.clone_from(&path.group);
    error.details.kind.clone_from(&path.plural);
    error
}

/// 403 for a path that is no resource.
pub(super) fn forbidden_path(identity: &Identity, verb: &str, path: &str) -> ApiError {
    let message = format!(
        "forbidden: User \"{}\" cannot {verb} path \"{path}\"",
        identity.user
    );
    ApiError::new(403, "Forbidden", message)
}
