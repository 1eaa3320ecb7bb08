//! The cluster CA and the certificates issued from it.
//!
//! Everything lies under `DATA_DIR/pki`, files 0600, and is made once: a restart uses what is there. The serving and
//! the administrator's certificate are issued anew when their names changed or their end is near.

use std::fs;
use std::io::Write as _;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData as _, SanType,
};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// DNS name that every serving certificate of the control plane carries.
pub const SERVER_NAME: &str = "weir-control";
/// Group whose members may do everything.
pub const ADMIN_GROUP: &str = "system:masters";
/// Group of the agents.
pub const NODE_GROUP: &str = "system:nodes";
/// Common name of an agent's certificate is this and the node's name.
pub const NODE_PREFIX: &str = "system:node:";

const CA_YEARS: i16 = 20;
const LEAF_YEARS: i16 = 2;
/// A certificate with less left than this is issued anew at start.
const RENEW_BEFORE_S: i64 = 60 * 24 * 3600;

/// Why a certificate could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("{what} {path}: {source}")]
    File {
        what: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path} is not usable: {why}; remove the file to have it made anew")]
    Content { path: PathBuf, why: String },
    #[error("issue a certificate for {name}: {source}")]
    Issue { name: String, source: rcgen::Error },
    #[error("no CA at {path}: run `weir-control serve` with this configuration first")]
    NoCa { path: PathBuf },
}

/// A certificate and its key, PEM.
#[derive(Clone)]
pub struct CertKey {
    pub cert_pem: String,
    pub key_pem: String,
}

impl std::fmt::Debug for CertKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CertKey").finish_non_exhaustive()
    }
}

impl CertKey {
    /// DER forms for TLS.
    ///
    /// # Errors
    /// `Content` when the PEM does not hold what it should.
    pub fn der(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), PkiError> {
        let bad = |why: String| PkiError::Content {
            path: "certificate or key".into(),
            why,
        };
        let certs = CertificateDer::pem_slice_iter(self.cert_pem.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| bad(e.to_string()))?;
        let key = PrivateKeyDer::from_pem_slice(self.key_pem.as_bytes())
            .map_err(|e| bad(e.to_string()))?;
        Ok((certs, key))
    }
}

/// Whom a certificate is for and where it is valid.
#[derive(Clone, Debug, Default)]
struct Subject {
    common_name: String,
    organization: Option<String>,
    dns: Vec<String>,
    ips: Vec<IpAddr>,
    server: bool,
}

/// The CA with the control plane's own certificates.
#[derive(Debug)]
pub struct Pki {
    pub ca_pem: String,
    /// Serves the API and the node feed, and is the client certificate towards agents.
    pub server: CertKey,
    /// CN=kubernetes-admin, O=system:masters.
    pub admin: CertKey,
}

/// The CA alone, able to issue.
pub struct Authority {
    pub ca_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// The CA on disk.
    ///
    /// # Errors
    /// `NoCa` when there is none, `File` and `Content` when it cannot be used.
    pub fn load(data_dir: &Path) -> Result<Self, PkiError> {
        let dir = data_dir.join("pki");
        let _lock = lock_existing(&dir)?;
        Self::load_from(&dir)
    }

    fn load_from(dir: &Path) -> Result<Self, PkiError> {
        match read_pair(dir, "ca")? {
            Some(pair) => Self::from_pair(&pair, &dir.join("ca.crt")),
            None => Err(PkiError::NoCa {
                path: dir.join("ca.crt"),
            }),
        }
    }

    fn from_pair(pair: &CertKey, path: &Path) -> Result<Self, PkiError> {
        let bad = |e: rcgen::Error| PkiError::Content {
            path: path.into(),
            why: e.to_string(),
        };
        let key = KeyPair::from_pem(&pair.key_pem).map_err(bad)?;
        let issuer = Issuer::from_ca_cert_pem(&pair.cert_pem, key).map_err(bad)?;
        Ok(Self {
            ca_pem: pair.cert_pem.clone(),
            issuer,
        })
    }

    fn load_or_create(dir: &Path) -> Result<Self, PkiError> {
        let path = dir.join("ca.crt");
        if let Some(pair) = read_pair(dir, "ca")? {
            return Self::from_pair(&pair, &path);
        }
        let fail = |source| PkiError::Issue {
            name: "the cluster CA".into(),
            source,
        };
        let mut params = CertificateParams::default();
        set_validity(&mut params, CA_YEARS);
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, "weir-ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::CrlSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        let key = KeyPair::generate().map_err(fail)?;
        let cert = params.self_signed(&key).map_err(fail)?;
        let pair = CertKey {
            cert_pem: cert.pem(),
            key_pem: key.serialize_pem(),
        };
        write_pair(dir, "ca", &pair)?;
        Self::from_pair(&pair, &path)
    }

    /// A node's certificate: client of the feed and server of the node API.
    ///
    /// # Errors
    /// `Issue` when the name does not fit into a certificate.
    pub fn issue_node(&self, name: &str, ips: &[IpAddr]) -> Result<CertKey, PkiError> {
        self.issue(&Subject {
            common_name: format!("{NODE_PREFIX}{name}"),
            organization: Some(NODE_GROUP.into()),
            dns: vec![name.to_owned()],
            ips: ips.to_vec(),
            server: true,
        })
    }

    fn issue(&self, subject: &Subject) -> Result<CertKey, PkiError> {
        let fail = |source| PkiError::Issue {
            name: subject.common_name.clone(),
            source,
        };
        let mut params = CertificateParams::new(subject.dns.clone()).map_err(fail)?;
        params
            .subject_alt_names
            .extend(subject.ips.iter().map(|ip| SanType::IpAddress(*ip)));
        set_validity(&mut params, LEAF_YEARS);
        params.distinguished_name = DistinguishedName::new();
        if let Some(organization) = &subject.organization {
            params
                .distinguished_name
                .push(DnType::OrganizationName, organization);
        }
        params
            .distinguished_name
            .push(DnType::CommonName, &subject.common_name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if subject.server {
            params
                .extended_key_usages
                .push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(fail)?;
        let cert = params.signed_by(&key, &self.issuer).map_err(fail)?;
        Ok(CertKey {
            cert_pem: cert.pem(),
            key_pem: key.serialize_pem(),
        })
    }

    /// What lies at `DIR/NAME.crt` when it is still good for `subject`, else a new one.
    fn load_or_issue(
        &self,
        dir: &Path,
        name: &str,
        subject: &Subject,
    ) -> Result<CertKey, PkiError> {
        if let Some(pair) = read_pair(dir, name)?
            && still_good(&pair, subject, jiff::Timestamp::now().as_second())
        {
            return Ok(pair);
        }
        let pair = self.issue(subject)?;
        write_pair(dir, name, &pair)?;
        Ok(pair)
    }
}

impl Pki {
    /// Loads or makes the CA, the serving certificate for `names` and `ips`, and the administrator's.
    ///
    /// # Errors
    /// `File` and `Content` name the file at fault.
    pub fn open(data_dir: &Path, names: &[String], ips: &[IpAddr]) -> Result<Self, PkiError> {
        let dir = data_dir.join("pki");
        create_dir(&dir)?;
        let _lock = lock(&dir)?;
        let authority = Authority::load_or_create(&dir)?;
        let server = authority.load_or_issue(
            &dir,
            "server",
            &Subject {
                common_name: SERVER_NAME.into(),
                dns: names.to_vec(),
                ips: ips.to_vec(),
                server: true,
                ..Subject::default()
            },
        )?;
        let admin = authority.load_or_issue(&dir, "admin", &admin_subject())?;
        Ok(Self {
            ca_pem: authority.ca_pem,
            server,
            admin,
        })
    }
}

fn admin_subject() -> Subject {
    Subject {
        common_name: "kubernetes-admin".into(),
        organization: Some(ADMIN_GROUP.into()),
        ..Subject::default()
    }
}

/// The administrator's certificate of the CA on disk, with the CA's own.
///
/// # Errors
/// `NoCa` when the control plane has not run yet.
pub fn admin(data_dir: &Path) -> Result<(String, CertKey), PkiError> {
    let dir = data_dir.join("pki");
    let _lock = lock_existing(&dir)?;
    let authority = Authority::load_from(&dir)?;
    let pair = authority.load_or_issue(&dir, "admin", &admin_subject())?;
    Ok((authority.ca_pem, pair))
}

/// Held while pairs are read or made: a starting control plane and `weir-control kubeconfig` may do so at once, and a
/// certificate of the one would meet a key of the other.
fn lock(dir: &Path) -> Result<fs::File, PkiError> {
    let path = dir.join("lock");
    fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .and_then(|file| file.lock().map(|()| file))
        .map_err(|source| PkiError::File {
            what: "lock",
            path,
            source,
        })
}

/// As [`lock`], for those who need a CA that is there.
fn lock_existing(dir: &Path) -> Result<fs::File, PkiError> {
    if dir.is_dir() {
        return lock(dir);
    }
    Err(PkiError::NoCa {
        path: dir.join("ca.crt"),
    })
}

fn still_good(pair: &CertKey, subject: &Subject, now_s: i64) -> bool {
    let Ok((certs, _)) = pair.der() else {
        return false;
    };
    let Some(Ok((_, cert))) = certs
        .first()
        .map(|c| x509_parser::parse_x509_certificate(c))
    else {
        return false;
    };
    if cert.validity().not_after.timestamp() - now_s < RENEW_BEFORE_S {
        return false;
    }
    // A crash between the two files leaves a new key beside an old certificate.
    let own_key = KeyPair::from_pem(&pair.key_pem)
        .is_ok_and(|key| key.subject_public_key_info() == cert.public_key().raw);
    if !own_key {
        return false;
    }
    let names = cert.subject_alternative_name().ok().flatten();
    let present: Vec<String> = names
        .iter()
        .flat_map(|n| &n.value.general_names)
        .filter_map(|n| match n {
            x509_parser::extensions::GeneralName::DNSName(name) => Some((*name).to_owned()),
            x509_parser::extensions::GeneralName::IPAddress(bytes) => ip_text(bytes),
            _ => None,
        })
        .collect();
    let ips = subject.ips.iter().map(ToString::to_string);
    subject
        .dns
        .iter()
        .cloned()
        .chain(ips)
        .all(|wanted| present.contains(&wanted))
}

fn ip_text(bytes: &[u8]) -> Option<String> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(IpAddr::from(v4).to_string());
    }
    <[u8; 16]>::try_from(bytes)
        .ok()
        .map(|v6| IpAddr::from(v6).to_string())
}

/// From yesterday (clocks differ) for so many years.
fn set_validity(params: &mut CertificateParams, years: i16) {
    let date = |d: jiff::civil::Date| {
        let (month, day) = (d.month().unsigned_abs(), d.day().unsigned_abs());
        rcgen::date_time_ymd(d.year().into(), month, day)
    };
    let today = jiff::tz::TimeZone::UTC
        .to_datetime(jiff::Timestamp::now())
        .date();
    params.not_before = date(today.yesterday().unwrap_or(today));
    params.not_after = date(today.saturating_add(jiff::Span::new().years(years)));
}

fn create_dir(dir: &Path) -> Result<(), PkiError> {
    use std::os::unix::fs::DirBuilderExt as _;
    let mut builder = fs::DirBuilder::new();
    builder
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|source| PkiError::File {
            what: "create the folder",
            path: dir.into(),
            source,
        })
}

/// `DIR/NAME.crt` and `DIR/NAME.key`, `None` unless both exist.
fn read_pair(dir: &Path, name: &str) -> Result<Option<CertKey>, PkiError> {
    let read = |path: PathBuf| match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PkiError::File {
            what: "read",
            path,
            source,
        }),
    };
    let cert = read(dir.join(format!("{name}.crt")))?;
    let key = read(dir.join(format!("{name}.key")))?;
    Ok(cert
        .zip(key)
        .map(|(cert_pem, key_pem)| CertKey { cert_pem, key_pem }))
}

/// Writes `DIR/NAME.key`, then `DIR/NAME.crt`: a pair that was cut short is not a pair.
///
/// # Errors
/// `File` with the path.
pub fn write_pair(dir: &Path, name: &str, pair: &CertKey) -> Result<(), PkiError> {
    create_dir(dir)?;
    write_private(&dir.join(format!("{name}.key")), pair.key_pem.as_bytes())?;
    write_private(&dir.join(format!("{name}.crt")), pair.cert_pem.as_bytes())
}

/// Replaces a file at once, mode 0600, durable.
///
/// # Errors
/// `File` with the path.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), PkiError> {
    let fail = |what, source| PkiError::File {
        what,
        path: path.into(),
        source,
    };
    let draft = path.with_extension("new");
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&draft)
        .map_err(|e| fail("create", e))?;
    file.write_all(content)
        .and_then(|()| file.sync_all())
        .map_err(|e| fail("write", e))?;
    fs::rename(&draft, path).map_err(|e| fail("replace", e))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_restart_uses_what_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let names = vec![SERVER_NAME.to_owned()];
        let ips: Vec<IpAddr> = vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()];
        let first = Pki::open(dir.path(), &names, &ips).unwrap();
        let second = Pki::open(dir.path(), &names, &ips).unwrap();
        assert_eq!(first.ca_pem, second.ca_pem);
        assert_eq!(first.server.cert_pem, second.server.cert_pem);
        let more = vec![SERVER_NAME.to_owned(), "other.example".to_owned()];
        let third = Pki::open(dir.path(), &more, &ips).unwrap();
        assert_eq!(first.ca_pem, third.ca_pem);
        assert_ne!(first.server.cert_pem, third.server.cert_pem);
        assert_eq!(first.admin.cert_pem, third.admin.cert_pem);
        for entry in fs::read_dir(dir.path().join("pki")).unwrap() {
            let mode = entry.unwrap().metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
    }

    #[test]
    fn a_start_and_a_kubeconfig_at_once_make_one_pair() {
        for _ in 0..8 {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path();
            // The CA is there, as after the first moments of a start.
            Authority::load_or_create(&path.join("pki")).unwrap();
            let pairs = std::thread::scope(|scope| {
                let admins: Vec<_> = (0..4)
                    .map(|_| scope.spawn(|| admin(path).unwrap().1))
                    .collect();
                let opened = Pki::open(path, &[], &[]).unwrap().admin;
                let mut pairs: Vec<CertKey> =
                    admins.into_iter().map(|t| t.join().unwrap()).collect();
                pairs.push(opened);
                pairs
            });
            for pair in &pairs {
                assert_eq!(pair.cert_pem, pairs[0].cert_pem);
                assert_eq!(pair.key_pem, pairs[0].key_pem);
            }
        }
    }

    #[test]
    fn a_certificate_beside_another_key_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let first = Pki::open(dir.path(), &[], &[]).unwrap();
        let key = KeyPair::generate().unwrap().serialize_pem();
        write_private(&dir.path().join("pki/admin.key"), key.as_bytes()).unwrap();
        let second = Pki::open(dir.path(), &[], &[]).unwrap();
        assert_ne!(first.admin.cert_pem, second.admin.cert_pem);
        assert_ne!(second.admin.key_pem, key);
        assert_eq!(first.server.cert_pem, second.server.cert_pem);
    }

    #[test]
    fn nodes_need_a_ca_first() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            Authority::load(dir.path()),
            Err(PkiError::NoCa { .. })
        ));
        Pki::open(dir.path(), &[], &[]).unwrap();
        let node = Authority::load(dir.path())
            .unwrap()
            .issue_node("n1", &[])
            .unwrap();
        let (certs, _) = node.der().unwrap();
        let (_, cert) = x509_parser::parse_x509_certificate(&certs[0]).unwrap();
        let name = cert
            .subject()
            .iter_common_name()
            .next()
            .unwrap()
            .as_str()
            .unwrap();
        assert_eq!(name, "system:node:n1");
    }

    #[test]
    fn a_broken_ca_names_its_file() {
        let dir = tempfile::tempdir().unwrap();
        Pki::open(dir.path(), &[], &[]).unwrap();
        fs::write(dir.path().join("pki/ca.key"), "nonsense").unwrap();
        let error = Pki::open(dir.path(), &[], &[]).unwrap_err().to_string();
        assert!(error.contains("ca.crt"), "{error}");
    }
}
