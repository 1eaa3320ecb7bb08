//! Which form of an answer the client takes. Pure.

use crate::status::ApiError;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Media {
    #[default]
    Json,
    Yaml,
    Protobuf,
}

impl Media {
    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Yaml => "application/yaml",
            Self::Protobuf => "application/vnd.kubernetes.protobuf",
        }
    }
}

/// `as=` of a media type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Transform {
    #[default]
    None,
    Table {
        beta: bool,
    },
    Partial,
    PartialList,
    /// `apidiscovery.k8s.io`
    Discovery {
        beta: bool,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Form {
    pub(super) media: Media,
    pub(super) transform: Transform,
}

/// What an endpoint can answer besides plain objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Object,
    List,
    Watch,
    Discovery,
    Other,
}

impl Endpoint {
    fn offers(self, form: Form) -> bool {
        match form.transform {
            Transform::None => true,
            Transform::Table { .. } => {
                matches!(self, Self::Object | Self::List | Self::Watch)
                    && form.media != Media::Protobuf
            }
            Transform::Partial => matches!(self, Self::Object | Self::Watch),
            Transform::PartialList => self == Self::List,
            Transform::Discovery { .. } => self == Self::Discovery && form.media == Media::Json,
        }
    }
}

/// The first form in `accept` that the endpoint offers; JSON before protobuf where the client takes both as they are,
/// because objects are stored as JSON.
///
/// # Errors
/// 406.
pub(super) fn negotiate(accept: &str, endpoint: Endpoint) -> Result<Form, ApiError> {
    if accept.trim().is_empty() {
        return Ok(Form::default());
    }
    let mut clauses: Vec<(Form, f32)> = accept
        .split(',')
        .filter_map(parse_clause)
        .filter(|(form, quality)| *quality > 0.0 && endpoint.offers(*form))
        .collect();
    clauses.sort_by(|a, b| b.1.total_cmp(&a.1));
    let Some((first, _)) = clauses.first() else {
        return Err(not_acceptable());
    };
    let json = Form {
        media: Media::Json,
        ..*first
    };
    let also_json = clauses.iter().any(|(form, _)| *form == json);
    Ok(if also_json { json } else { *first })
}

fn not_acceptable() -> ApiError {
    ApiError::new(
        406,
        "NotAcceptable",
        "only the following media types are accepted: application/json, application/yaml, application/vnd.kubernetes.protobuf",
    )
}

fn parse_clause(clause: &str) -> Option<(Form, f32)> {
    let mut parts = clause.split(';').map(str::trim);
    let media = match parts.next()?.to_ascii_lowercase().as_str() {
        "application/json" | "*/*" | "application/*" => Media::Json,
        "application/yaml" => Media::Yaml,
        "application/vnd.kubernetes.protobuf" => Media::Protobuf,
        _ => return None,
    };
    let (mut kind, mut version, mut group, mut quality) = ("", "", "", 1.0);
    for (key, value) in parts.filter_map(|p| p.split_once('=')) {
        match key.trim() {
            "as" => kind = value.trim(),
            "v" => version = value.trim(),
            "g" => group = value.trim(),
            "q" => quality = value.trim().parse().unwrap_or(0.0),
            _ => {}
        }
    }
    let transform = match (kind, group, version) {
        ("", _, _) => Transform::None,
        ("Table", "meta.k8s.io", "v1") => Transform::Table { beta: false },
        ("Table", "meta.k8s.io", "v1beta1") => Transform::Table { beta: true },
        ("PartialObjectMetadata", "meta.k8s.io", "v1") => Transform::Partial,
        ("PartialObjectMetadataList", "meta.k8s.io", "v1") => Transform::PartialList,
        ("APIGroupDiscoveryList", "apidiscovery.k8s.io", "v2") => {
            Transform::Discovery { beta: false }
        }
        ("APIGroupDiscoveryList", "apidiscovery.k8s.io", "v2beta1") => {
            Transform::Discovery { beta: true }
        }
        _ => return None,
    };
    Some((Form { media, transform }, quality))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(accept: &str, endpoint: Endpoint) -> Result<(Media, Transform), u16> {
        negotiate(accept, endpoint)
            .map(|f| (f.media, f.transform))
            .map_err(|e| e.code)
    }

    #[test]
    fn the_first_form_that_is_offered() {
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io, application/json";
        assert_eq!(
            of(table, Endpoint::List),
            Ok((Media::Json, Transform::Table { beta: false }))
        );
        let unknown = "application/json;as=Table;v=v9;g=meta.k8s.io, application/json";
        assert_eq!(
            of(unknown, Endpoint::Object),
            Ok((Media::Json, Transform::None))
        );
        assert_eq!(
            of(
                "application/json;as=Table;v=v9;g=meta.k8s.io",
                Endpoint::Object
            ),
            Err(406)
        );
        assert_eq!(of("text/csv", Endpoint::Object), Err(406));
        assert_eq!(of("", Endpoint::Object), Ok((Media::Json, Transform::None)));
        let both = "application/vnd.kubernetes.protobuf,application/json";
        assert_eq!(of(both, Endpoint::List), Ok((Media::Json, Transform::None)));
        let proto = "application/vnd.kubernetes.protobuf";
        assert_eq!(
            of(proto, Endpoint::List),
            Ok((Media::Protobuf, Transform::None))
        );
    }
}
