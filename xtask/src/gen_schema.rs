//! Developer task: reads the Go sources of Kubernetes' API types and writes the fact table that the API server's
//! `schema` room embeds (types, JSON names, protobuf numbers, list and merge keys, defaults). No prose is taken over.
//!
//! The sources are found or fetched with `go mod download`; only this task needs Go, no build and no test does.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

/// The release whose types are read.
const MODULE_VERSION: &str = "v0.36.0";
/// The module of ClusterNetworkPolicy, which has releases of its own.
const POLICY: &str = "sigs.k8s.io/network-policy-api";
const POLICY_VERSION: &str = "v0.2.0";

/// One Go package of API types.
struct Package {
    module: &'static str,
    dir: &'static str,
    /// Prefix of the OpenAPI names of its types.
    prefix: &'static str,
    group: &'static str,
    version: &'static str,
}

const fn api(
    dir: &'static str,
    prefix: &'static str,
    group: &'static str,
    version: &'static str,
) -> Package {
    Package {
        module: "k8s.io/api",
        dir,
        prefix,
        group,
        version,
    }
}

const META: &str = "k8s.io/apimachinery";

/// Every package in the table; a type outside these may not be referenced.
const PACKAGES: &[Package] = &[
    Package {
        module: META,
        dir: "pkg/apis/meta/v1",
        prefix: "io.k8s.apimachinery.pkg.apis.meta.v1",
        group: "meta.k8s.io",
        version: "v1",
    },
    Package {
        module: META,
        dir: "pkg/runtime",
        prefix: "io.k8s.apimachinery.pkg.runtime",
        group: "-",
        version: "-",
    },
    Package {
        module: META,
        dir: "pkg/types",
        prefix: "io.k8s.apimachinery.pkg.types",
        group: "-",
        version: "-",
    },
    api("core/v1", "io.k8s.api.core.v1", "", "v1"),
    api("apps/v1", "io.k8s.api.apps.v1", "apps", "v1"),
    api("batch/v1", "io.k8s.api.batch.v1", "batch", "v1"),
    api(
        "autoscaling/v1",
        "io.k8s.api.autoscaling.v1",
        "autoscaling",
        "v1",
    ),
    api(
        "autoscaling/v2",
        "io.k8s.api.autoscaling.v2",
        "autoscaling",
        "v2",
    ),
    api(
        "authentication/v1",
        "io.k8s.api.authentication.v1",
        "authentication.k8s.io",
        "v1",
    ),
    api(
        "authorization/v1",
        "io.k8s.api.authorization.v1",
        "authorization.k8s.io",
        "v1",
    ),
    api(
        "certificates/v1",
        "io.k8s.api.certificates.v1",
        "certificates.k8s.io",
        "v1",
    ),
    api(
        "coordination/v1",
        "io.k8s.api.coordination.v1",
        "coordination.k8s.io",
        "v1",
    ),
    api(
        "discovery/v1",
        "io.k8s.api.discovery.v1",
        "discovery.k8s.io",
        "v1",
    ),
    api("events/v1", "io.k8s.api.events.v1", "events.k8s.io", "v1"),
    api(
        "networking/v1",
        "io.k8s.api.networking.v1",
        "networking.k8s.io",
        "v1",
    ),
    api("node/v1", "io.k8s.api.node.v1", "node.k8s.io", "v1"),
    api("policy/v1", "io.k8s.api.policy.v1", "policy", "v1"),
    api(
        "rbac/v1",
        "io.k8s.api.rbac.v1",
        "rbac.authorization.k8s.io",
        "v1",
    ),
    api(
        "scheduling/v1",
        "io.k8s.api.scheduling.v1",
        "scheduling.k8s.io",
        "v1",
    ),
    api(
        "storage/v1",
        "io.k8s.api.storage.v1",
        "storage.k8s.io",
        "v1",
    ),
    api(
        "admissionregistration/v1",
        "io.k8s.api.admissionregistration.v1",
        "admissionregistration.k8s.io",
        "v1",
    ),
    api(
        "admission/v1",
        "io.k8s.api.admission.v1",
        "admission.k8s.io",
        "v1",
    ),
    api(
        "flowcontrol/v1",
        "io.k8s.api.flowcontrol.v1",
        "flowcontrol.apiserver.k8s.io",
        "v1",
    ),
    api(
        "resource/v1",
        "io.k8s.api.resource.v1",
        "resource.k8s.io",
        "v1",
    ),
    api(
        "apidiscovery/v2",
        "io.k8s.api.apidiscovery.v2",
        "apidiscovery.k8s.io",
        "v2",
    ),
    Package {
        module: "k8s.io/apiextensions-apiserver",
        dir: "pkg/apis/apiextensions/v1",
        prefix: "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1",
        group: "apiextensions.k8s.io",
        version: "v1",
    },
    Package {
        module: "k8s.io/kube-aggregator",
        dir: "pkg/apis/apiregistration/v1",
        prefix: "io.k8s.kube-aggregator.pkg.apis.apiregistration.v1",
        group: "apiregistration.k8s.io",
        version: "v1",
    },
    Package {
        module: "k8s.io/metrics",
        dir: "pkg/apis/metrics/v1beta1",
        prefix: "io.k8s.metrics.pkg.apis.metrics.v1beta1",
        group: "metrics.k8s.io",
        version: "v1beta1",
    },
    Package {
        module: POLICY,
        dir: "apis/v1alpha2",
        prefix: "io.k8s.networking.policy.v1alpha2",
        group: "policy.networking.k8s.io",
        version: "v1alpha2",
    },
];

/// Types with their own JSON or protobuf form: Go import path and name, and the letter the table uses.
const SPECIAL: &[(&str, &str, &str)] = &[
    ("k8s.io/apimachinery/pkg/apis/meta/v1", "Time", "T"),
    ("k8s.io/apimachinery/pkg/apis/meta/v1", "MicroTime", "M"),
    ("k8s.io/apimachinery/pkg/apis/meta/v1", "Duration", "D"),
    ("k8s.io/apimachinery/pkg/apis/meta/v1", "FieldsV1", "V"),
    ("k8s.io/apimachinery/pkg/apis/meta/v1", "Verbs", "X"),
    ("k8s.io/api/authentication/v1", "ExtraValue", "X"),
    ("k8s.io/api/authorization/v1", "ExtraValue", "X"),
    ("k8s.io/api/certificates/v1", "ExtraValue", "X"),
    ("k8s.io/apimachinery/pkg/api/resource", "Quantity", "Q"),
    ("k8s.io/apimachinery/pkg/util/intstr", "IntOrString", "I"),
    ("k8s.io/apimachinery/pkg/runtime", "RawExtension", "R"),
    (
        "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1",
        "JSON",
        "J",
    ),
    (
        "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1",
        "JSONSchemaPropsOrBool",
        "B",
    ),
    (
        "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1",
        "JSONSchemaPropsOrArray",
        "A",
    ),
    (
        "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1",
        "JSONSchemaPropsOrStringArray",
        "S",
    ),
];

#[derive(Default)]
struct GoField {
    go_type: String,
    json: String,
    inline: bool,
    omit: bool,
    number: u32,
    optional: bool,
    markers: Markers,
}

#[derive(Clone, Default)]
struct Markers(Vec<(String, String)>);

impl Markers {
    fn add_comment(&mut self, comment: &str) {
        let text = comment.trim_start_matches('/').trim();
        if let Some(marker) = text.strip_prefix('+') {
            let (key, value) = marker.split_once('=').unwrap_or((marker, ""));
            self.0.push((key.trim().into(), value.trim().into()));
        }
    }
    fn get(&self, key: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, v)| v.as_str())
    }
    fn all(&self, key: &str) -> Vec<&str> {
        self.0
            .iter()
            .filter(|(k, _)| k == key)
            .map(|(_, v)| v.as_str())
            .collect()
    }
}

enum Definition {
    Struct {
        fields: Vec<GoField>,
        markers: Markers,
    },
    /// Another spelling of a type.
    Named(String),
}

struct GoType {
    name: String,
    definition: Definition,
    /// Import aliases of the file it stands in.
    imports: BTreeMap<String, String>,
}

/// Reads all packages and writes the table to `out`.
///
/// # Errors
/// When Go or the module proxy is missing, or a source has a form this reader does not know.
pub(crate) fn run(out: &Path) -> Result<()> {
    let mut dirs = BTreeMap::new();
    let mut packages = Vec::new();
    for package in PACKAGES {
        let root = match dirs.get(package.module) {
            Some(root) => root,
            None => dirs
                .entry(package.module)
                .or_insert(module_dir(package.module)?),
        };
        packages.push(read_package(&root.join(package.dir))?);
    }
    let text = Writer {
        packages: &packages,
    }
    .table()?;
    std::fs::write(out, text).with_context(|| format!("write the schema table {}", out.display()))
}

fn module_dir(module: &str) -> Result<PathBuf> {
    let version = if module == POLICY {
        POLICY_VERSION
    } else {
        MODULE_VERSION
    };
    let output = Command::new("go")
        .args(["mod", "download", "-json", &format!("{module}@{version}")])
        .output()
        .context("run `go mod download` (install Go to regenerate the schema table)")?;
    ensure!(
        output.status.success(),
        "fetch {module}@{version}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("parse the answer of `go mod download` for {module}"))?;
    let dir = answer["Dir"]
        .as_str()
        .with_context(|| format!("`go mod download` names no folder for {module}"))?;
    Ok(dir.into())
}

fn read_package(dir: &Path) -> Result<Vec<GoType>> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .with_context(|| format!("list Go sources in {}", dir.display()))?
        .filter_map(|entry| entry.ok().map(|e| e.path()))
        .filter(|path| {
            let name = path
                .file_name()
                .and_then(|n| n.to_str())
                .unwrap_or_default();
            name.ends_with(".go")
                && !name.starts_with("zz_")
                && !name.ends_with("_test.go")
                && !name.contains("generated")
        })
        .collect();
    files.sort();
    let mut types = Vec::new();
    for file in files {
        let text =
            std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        parse_file(&text, &mut types).with_context(|| format!("parse {}", file.display()))?;
    }
    Ok(types)
}

fn parse_file(text: &str, types: &mut Vec<GoType>) -> Result<()> {
    let imports = parse_imports(text);
    let mut markers = Markers::default();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("//") {
            markers.add_comment(line);
            continue;
        }
        if line.trim().is_empty() {
            continue;
        }
        let found = std::mem::take(&mut markers);
        let Some(rest) = line.strip_prefix("type ") else {
            continue;
        };
        let Some((name, body)) = rest.split_once(' ') else {
            continue;
        };
        if name.contains('[') || !name.starts_with(|c: char| c.is_ascii_uppercase()) {
            continue;
        }
        let body = body.split("//").next().unwrap_or_default().trim();
        let definition = if body == "struct {" {
            Definition::Struct {
                fields: parse_fields(&mut lines)?,
                markers: found,
            }
        } else if body == "struct{}" {
            Definition::Struct {
                fields: Vec::new(),
                markers: found,
            }
        } else if body.starts_with("func") || body.starts_with("interface") {
            continue;
        } else {
            Definition::Named(body.trim_start_matches("= ").into())
        };
        types.push(GoType {
            name: name.into(),
            definition,
            imports: imports.clone(),
        });
    }
    Ok(())
}

fn parse_imports(text: &str) -> BTreeMap<String, String> {
    let mut imports = BTreeMap::new();
    for line in text.lines().map(str::trim) {
        let line = line.strip_prefix("import ").unwrap_or(line);
        let Some(start) = line.find('"') else {
            continue;
        };
        let Some(path) = line[start + 1..].strip_suffix('"') else {
            continue;
        };
        if !path.starts_with("k8s.io/") {
            continue;
        }
        let alias = line[..start].trim();
        let last = path.rsplit('/').next().unwrap_or(path);
        imports.insert(
            if alias.is_empty() { last } else { alias }.to_owned(),
            path.to_owned(),
        );
    }
    imports
}

fn parse_fields(lines: &mut std::str::Lines<'_>) -> Result<Vec<GoField>> {
    let mut fields = Vec::new();
    let mut markers = Markers::default();
    for line in lines.by_ref() {
        let trimmed = line.trim();
        if line.starts_with('}') {
            return Ok(fields);
        }
        if trimmed.is_empty() {
            markers = Markers::default();
        } else if trimmed.starts_with("//") {
            markers.add_comment(trimmed);
        } else if let Some(field) = parse_field(trimmed, std::mem::take(&mut markers))? {
            fields.push(field);
        }
    }
    bail!("a struct has no end")
}

fn parse_field(line: &str, markers: Markers) -> Result<Option<GoField>> {
    let Some((head, tags)) = line.split_once('`') else {
        return Ok(None);
    };
    let tags = tags.split('`').next().unwrap_or_default();
    let tag = |key: &str| {
        let start = tags.find(&format!("{key}:\""))? + key.len() + 2;
        Some(&tags[start..start + tags[start..].find('"')?])
    };
    let Some(json) = tag("json") else {
        return Ok(None);
    };
    if json == "-" {
        return Ok(None);
    }
    let mut parts = json.split(',');
    let name = parts.next().unwrap_or_default();
    let options: Vec<&str> = parts.collect();
    let mut words = head.split_whitespace();
    let first = words.next().context("a field without a name")?;
    let go_type = words.next().unwrap_or(first);
    let number = match tag("protobuf").and_then(|p| p.split(',').nth(1)) {
        Some(number) => number
            .parse()
            .with_context(|| format!("protobuf number in {line}"))?,
        None => 0,
    };
    Ok(Some(GoField {
        go_type: go_type.into(),
        json: name.into(),
        inline: name.is_empty(),
        omit: options
            .iter()
            .any(|o| *o == "omitempty" || *o == "omitzero"),
        number,
        optional: markers.get("optional").is_some(),
        markers,
    }))
}

struct Writer<'a> {
    packages: &'a [Vec<GoType>],
}

impl Writer<'_> {
    fn table(&self) -> Result<String> {
        let mut out = String::from(
            "# Facts of the Kubernetes API types. Written by `cargo xtask gen-schema`, read by the schema room; do not edit.\n",
        );
        for (index, package) in PACKAGES.iter().enumerate() {
            writeln!(
                out,
                "P\t{}\t{}\t{}",
                package.prefix, package.group, package.version
            )?;
            let mut types: Vec<&GoType> = self.packages[index].iter().collect();
            types.sort_by(|a, b| a.name.cmp(&b.name));
            for t in types {
                let import = import_path(index);
                if SPECIAL
                    .iter()
                    .any(|(path, name, _)| *path == import && *name == t.name)
                {
                    continue;
                }
                if let Definition::Struct { fields, markers } = &t.definition
                    && self.worth_keeping(index, fields)
                {
                    self.write_type(&mut out, index, t, fields, markers)?;
                }
            }
        }
        Ok(out)
    }

    /// In the meta group, structs without a single JSON field are helpers of the Go code.
    fn worth_keeping(&self, index: usize, fields: &[GoField]) -> bool {
        let package = &PACKAGES[index];
        let helper = package.module == META && fields.is_empty();
        package.group != "-" && !helper
    }

    fn write_type(
        &self,
        out: &mut String,
        package: usize,
        t: &GoType,
        fields: &[GoField],
        markers: &Markers,
    ) -> Result<()> {
        let inline = |name: &str| {
            fields
                .iter()
                .any(|f| f.inline && f.go_type.rsplit('.').next() == Some(name))
        };
        let mut flags = String::new();
        if inline("TypeMeta") {
            flags.push('K');
        }
        if markers.get("structType") == Some("atomic") || markers.get("mapType") == Some("atomic") {
            flags.push('A');
        }
        writeln!(out, "T\t{}\t{flags}", t.name)?;
        for field in fields {
            self.write_field(out, package, t, field)
                .with_context(|| format!("type {} field {}", t.name, field.json))?;
        }
        Ok(())
    }

    fn write_field(
        &self,
        out: &mut String,
        package: usize,
        t: &GoType,
        field: &GoField,
    ) -> Result<()> {
        let pointer = field.go_type.starts_with('*');
        let kind = self.kind(package, &t.imports, field.go_type.trim_start_matches('*'))?;
        let required = field.markers.get("required").is_some()
            || (!field.inline && !field.omit && !field.optional);
        let mut flags = Vec::new();
        for (set, letter) in [
            (field.inline, "i"),
            (pointer, "p"),
            (field.omit, "o"),
            (required, "r"),
        ] {
            if set {
                flags.push(letter.to_owned());
            }
        }
        self.merge_flags(&mut flags, field);
        writeln!(
            out,
            "{}\t{}\t{kind}\t{}",
            field.json,
            field.number,
            flags.join(" ")
        )?;
        Ok(())
    }

    fn merge_flags(&self, flags: &mut Vec<String>, field: &GoField) {
        let m = &field.markers;
        match m.get("listType") {
            Some("map") => flags.push(format!("lt=map:{}", m.all("listMapKey").join(","))),
            Some(other) => flags.push(format!("lt={other}")),
            None => {}
        }
        if let Some(kind) = m.get("mapType").or_else(|| m.get("structType")) {
            flags.push(format!("mt={kind}"));
        }
        if let Some(strategy) = m.get("patchStrategy") {
            flags.push(format!("ps={strategy}"));
        }
        if let Some(key) = m.get("patchMergeKey") {
            flags.push(format!("mk={key}"));
        }
        if let Some(default) = m
            .get("default")
            .filter(|d| !d.starts_with("ref(") && !d.contains(' '))
        {
            flags.push(format!("d={default}"));
        }
    }

    /// The table's spelling of a Go type.
    fn kind(&self, package: usize, imports: &BTreeMap<String, String>, go: &str) -> Result<String> {
        if go == "[]byte" {
            return Ok("y".into());
        }
        if let Some(element) = go.strip_prefix("[]") {
            return Ok(format!(
                "[]{}",
                self.kind(package, imports, element.trim_start_matches('*'))?
            ));
        }
        if let Some(rest) = go.strip_prefix("map[") {
            let (_, value) = rest.split_once(']').context("a map type without a value")?;
            return Ok(format!(
                "{{}}{}",
                self.kind(package, imports, value.trim_start_matches('*'))?
            ));
        }
        Ok(match go {
            "string" | "error" => "s".into(),
            "bool" => "b".into(),
            "int32" | "uint32" | "rune" | "uint8" | "byte" => "i".into(),
            "int64" | "uint64" | "int" => "l".into(),
            "float64" => "d".into(),
            "interface{}" | "any" => "a".into(),
            _ => return self.named(package, imports, go),
        })
    }

    fn named(
        &self,
        package: usize,
        imports: &BTreeMap<String, String>,
        go: &str,
    ) -> Result<String> {
        let (path, name) = match go.split_once('.') {
            Some((alias, name)) => (
                imports
                    .get(alias)
                    .with_context(|| format!("import alias {alias} of {go}"))?
                    .clone(),
                name,
            ),
            None => (import_path(package), go),
        };
        if let Some((_, _, letter)) = SPECIAL.iter().find(|(p, n, _)| *p == path && *n == name) {
            return Ok((*letter).into());
        }
        let Some(index) = (0..PACKAGES.len()).find(|i| import_path(*i) == path) else {
            bail!("type {go} is in {path}, which is not in the package list");
        };
        let target = self.packages[index]
            .iter()
            .find(|t| t.name == name)
            .with_context(|| format!("type {name} of {path} is not defined"))?;
        match &target.definition {
            Definition::Named(other) => self.kind(index, &target.imports, other),
            Definition::Struct { .. } if index == package => Ok(format!(".{name}")),
            Definition::Struct { .. } => Ok(format!("{index}.{name}")),
        }
    }
}

fn import_path(package: usize) -> String {
    format!("{}/{}", PACKAGES[package].module, PACKAGES[package].dir)
}
