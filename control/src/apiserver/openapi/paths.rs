//! Paths and operations of a resource and its subresources.

use serde_json::{Map, Value, json};

use super::schemas::{Style, kind_name, meta_name, reference};
use crate::apiserver::registry::{ResourceDef, SubresourceDef, Verb};
use crate::apiserver::schema::schema;

const LIST_PARAMETERS: &[(&str, &str)] = &[
    ("allowWatchBookmarks", "boolean"),
    ("continue", "string"),
    ("fieldSelector", "string"),
    ("labelSelector", "string"),
    ("limit", "integer"),
    ("resourceVersion", "string"),
    ("resourceVersionMatch", "string"),
    ("sendInitialEvents", "boolean"),
    ("timeoutSeconds", "integer"),
    ("watch", "boolean"),
];
const WRITE_PARAMETERS: &[(&str, &str)] = &[
    ("dryRun", "string"),
    ("fieldManager", "string"),
    ("fieldValidation", "string"),
];
const PATCH_PARAMETERS: &[(&str, &str)] = &[
    ("dryRun", "string"),
    ("fieldManager", "string"),
    ("fieldValidation", "string"),
    ("force", "boolean"),
];
const DELETE_PARAMETERS: &[(&str, &str)] = &[
    ("dryRun", "string"),
    ("gracePeriodSeconds", "integer"),
    ("orphanDependents", "boolean"),
    ("propagationPolicy", "string"),
];
const ANSWER_TYPES: &[&str] = &[
    "application/json",
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
];
pub(super) const APPLY_PATCH: &str = "application/apply-patch+yaml";
const PATCH_TYPES: &[&str] = &[
    APPLY_PATCH,
    "application/json-patch+json",
    "application/merge-patch+json",
];
const STRATEGIC_PATCH: &str = "application/strategic-merge-patch+json";

/// Adds the paths of one resource.
pub(super) fn add(def: &ResourceDef, style: Style, paths: &mut Map<String, Value>) {
    let root = if def.group.is_empty() {
        "/api".to_owned()
    } else {
        format!("/apis/{}", def.group)
    };
    let root = format!("{root}/{}", def.version);
    let scope = if def.namespaced {
        "/namespaces/{namespace}"
    } else {
        ""
    };
    let collection = format!("{root}{scope}/{}", def.plural);
    let own = Body::of_kind(&def.group, &def.version, &def.kind);
    let scoped = if def.namespaced { "Namespaced" } else { "" };
    if def.namespaced && def.allows(Verb::List) {
        let maker = Maker {
            style,
            def,
            scope: "",
            subject: format!("{}ForAllNamespaces", def.kind),
        };
        let item = json!({"get": maker.operation("list", &own)});
        paths.insert(
            format!("{root}/{}", def.plural),
            maker.with_path_parameters(item, &[]),
        );
    }
    let maker = Maker {
        style,
        def,
        scope: scoped,
        subject: def.kind.to_string(),
    };
    let namespace: &[&str] = if def.namespaced { &["namespace"] } else { &[] };
    let named: &[&str] = if def.namespaced {
        &["name", "namespace"]
    } else {
        &["name"]
    };
    let item = maker.item(
        &own,
        &[
            (Verb::List, "get", "list"),
            (Verb::Create, "post", "post"),
            (Verb::DeleteCollection, "delete", "deletecollection"),
        ],
        def.verbs,
    );
    paths.insert(
        collection.clone(),
        maker.with_path_parameters(item, namespace),
    );
    let single: &[(Verb, &str, &str)] = &[
        (Verb::Get, "get", "get"),
        (Verb::Update, "put", "put"),
        (Verb::Patch, "patch", "patch"),
        (Verb::Delete, "delete", "delete"),
    ];
    let item = maker.item(&own, single, def.verbs);
    if item.as_object().is_some_and(|m| !m.is_empty()) {
        paths.insert(
            format!("{collection}/{{name}}"),
            maker.with_path_parameters(item, named),
        );
    }
    for sub in &def.subresources {
        add_subresource(sub, &maker, &collection, named, paths);
    }
}

fn add_subresource(
    sub: &SubresourceDef,
    parent: &Maker<'_>,
    collection: &str,
    named: &[&str],
    paths: &mut Map<String, Value>,
) {
    let body = Body::of_kind(&sub.group, &sub.version, &sub.kind);
    let subject = format!("{}{}", parent.def.kind, capitalised(sub.name));
    let maker = Maker {
        subject,
        ..parent.clone()
    };
    let wanted: &[(Verb, &str, &str)] = &[
        (Verb::Get, "get", "get"),
        (Verb::Create, "post", "post"),
        (Verb::Update, "put", "put"),
        (Verb::Patch, "patch", "patch"),
    ];
    let item = maker.item(&body, wanted, sub.verbs);
    paths.insert(
        format!("{collection}/{{name}}/{}", sub.name),
        maker.with_path_parameters(item, named),
    );
}

/// What an operation's bodies hold.
struct Body {
    gvk: Value,
    name: String,
    list_name: String,
    /// Only kinds with a schema know how lists merge.
    strategic: bool,
}

impl Body {
    fn of_kind(group: &str, version: &str, kind: &str) -> Self {
        Self {
            gvk: json!({"group": group, "version": version, "kind": kind}),
            name: kind_name(group, version, kind),
            list_name: kind_name(group, version, &format!("{kind}List")),
            strategic: schema().kind(group, version, kind).is_some(),
        }
    }
}

#[derive(Clone)]
struct Maker<'a> {
    style: Style,
    def: &'a ResourceDef,
    scope: &'static str,
    subject: String,
}

impl Maker<'_> {
    fn item(&self, body: &Body, wanted: &[(Verb, &str, &str)], verbs: &[Verb]) -> Value {
        let operations = wanted.iter().filter(|(verb, _, _)| verbs.contains(verb));
        let item: Map<String, Value> = operations
            .map(|(_, method, action)| ((*method).to_owned(), self.operation(action, body)))
            .collect();
        Value::Object(item)
    }

    fn operation(&self, action: &str, body: &Body) -> Value {
        let (verb, parameters): (&str, &[(&str, &str)]) = match action {
            "list" => ("list", LIST_PARAMETERS),
            "post" => ("create", WRITE_PARAMETERS),
            "put" => ("replace", WRITE_PARAMETERS),
            "patch" => ("patch", PATCH_PARAMETERS),
            "delete" => ("delete", DELETE_PARAMETERS),
            "deletecollection" => ("deleteCollection", DELETE_PARAMETERS),
            _ => ("read", &[]),
        };
        let mut parameters: Vec<Value> = parameters
            .iter()
            .map(|(name, kind)| self.parameter(name, kind, "query"))
            .collect();
        if action == "deletecollection" {
            let list = LIST_PARAMETERS
                .iter()
                .filter(|(n, _)| !["allowWatchBookmarks", "watch"].contains(n));
            parameters.extend(list.map(|(name, kind)| self.parameter(name, kind, "query")));
        }
        let mut operation = json!({
            "operationId": self.operation_id(verb),
            "tags": [self.tag()],
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": body.gvk,
        });
        let request = match action {
            "post" | "put" => Some(body.name.clone()),
            "patch" => Some(meta_name("Patch")),
            "delete" | "deletecollection" => Some(meta_name("DeleteOptions")),
            _ => None,
        };
        let answer = match action {
            "list" => &body.list_name,
            "delete" | "deletecollection" => &meta_name("Status"),
            _ => &body.name,
        };
        let codes: &[&str] = match action {
            "post" => &["200", "201", "202"],
            "put" | "patch" => &["200", "201"],
            "delete" => &["200", "202"],
            _ => &["200"],
        };
        match self.style {
            Style::V3 => self.bodies_v3(&mut operation, action, body, request, answer, codes),
            Style::V2 => self.bodies_v2(
                &mut operation,
                action,
                body,
                request,
                answer,
                codes,
                &mut parameters,
            ),
        }
        if !parameters.is_empty() {
            operation["parameters"] = parameters.into();
        }
        operation
    }

    fn bodies_v3(
        &self,
        operation: &mut Value,
        action: &str,
        body: &Body,
        request: Option<String>,
        answer: &str,
        codes: &[&str],
    ) {
        if let Some(request) = request {
            let media = json!({"schema": reference(self.style, &request)});
            let types = if action == "patch" {
                patch_types(body)
            } else {
                vec!["*/*"]
            };
            let content: Map<String, Value> = types
                .into_iter()
                .map(|t| (t.to_owned(), media.clone()))
                .collect();
            operation["requestBody"] = json!({"content": content});
            if !action.starts_with("delete") {
                operation["requestBody"]["required"] = true.into();
            }
        }
        let media = json!({"schema": reference(self.style, answer)});
        let mut types = ANSWER_TYPES.to_vec();
        if action == "list" {
            types.extend([
                "application/json;stream=watch",
                "application/vnd.kubernetes.protobuf;stream=watch",
            ]);
        }
        let content: Map<String, Value> = types
            .into_iter()
            .map(|t| (t.to_owned(), media.clone()))
            .collect();
        let mut responses = Map::new();
        for code in codes {
            responses.insert(
                (*code).to_owned(),
                json!({"description": "OK", "content": content}),
            );
        }
        responses.insert("401".into(), json!({"description": "Unauthorized"}));
        operation["responses"] = Value::Object(responses);
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "the parts of one operation, used at one place"
    )]
    fn bodies_v2(
        &self,
        operation: &mut Value,
        action: &str,
        body: &Body,
        request: Option<String>,
        answer: &str,
        codes: &[&str],
        parameters: &mut Vec<Value>,
    ) {
        operation["consumes"] = if action == "patch" {
            json!(patch_types(body))
        } else {
            json!(["*/*"])
        };
        operation["produces"] = json!(ANSWER_TYPES);
        operation["schemes"] = json!(["https"]);
        if let Some(request) = request {
            let required = !action.starts_with("delete");
            let mut parameter =
                json!({"name": "body", "in": "body", "schema": reference(self.style, &request)});
            if required {
                parameter["required"] = true.into();
            }
            parameters.insert(0, parameter);
        }
        let mut responses = Map::new();
        for code in codes {
            responses.insert(
                (*code).to_owned(),
                json!({"description": "OK", "schema": reference(self.style, answer)}),
            );
        }
        responses.insert("401".into(), json!({"description": "Unauthorized"}));
        operation["responses"] = Value::Object(responses);
    }

    fn parameter(&self, name: &str, kind: &str, place: &str) -> Value {
        let mut parameter = match self.style {
            Style::V3 => {
                json!({"name": name, "in": place, "schema": {"type": kind, "uniqueItems": true}})
            }
            Style::V2 => json!({"name": name, "in": place, "type": kind, "uniqueItems": true}),
        };
        if place == "path" {
            parameter["required"] = true.into();
        }
        parameter
    }

    fn with_path_parameters(&self, mut item: Value, names: &[&str]) -> Value {
        let mut parameters: Vec<Value> = names
            .iter()
            .map(|name| self.parameter(name, "string", "path"))
            .collect();
        parameters.push(self.parameter("pretty", "string", "query"));
        item["parameters"] = parameters.into();
        item
    }

    /// For example createAppsV1NamespacedDeployment.
    fn operation_id(&self, verb: &str) -> String {
        let group = self.def.group.split('.').next().unwrap_or_default();
        let group = if group.is_empty() {
            "Core".to_owned()
        } else {
            capitalised(group)
        };
        let (verb, collection) = match verb {
            "deleteCollection" => ("delete", "Collection"),
            other => (other, ""),
        };
        format!(
            "{verb}{group}{}{collection}{}{}",
            capitalised(&self.def.version),
            self.scope,
            self.subject
        )
    }

    fn tag(&self) -> String {
        let group = self.def.group.split('.').next().unwrap_or_default();
        format!(
            "{}_{}",
            if group.is_empty() { "core" } else { group },
            self.def.version
        )
    }
}

fn patch_types(body: &Body) -> Vec<&'static str> {
    let mut types = PATCH_TYPES.to_vec();
    if body.strategic {
        types.push(STRATEGIC_PATCH);
    }
    types
}

fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters).collect()
    })
}
