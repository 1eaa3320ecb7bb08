//! Signed tokens of service accounts: JWTs with ES256 (RFC 7519, RFC 7518). What their claims mean is decided in `api`.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _, SigningKey as _};
use rustls::SignatureScheme;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::pki::{self, PkiError};

const KEY_FILE: &str = "service-accounts.key";
/// Longest token that is looked at.
const TOKEN_BYTES: usize = 16 << 10;
/// One coordinate of a P-256 signature.
const COORDINATE: usize = 32;

/// The key that signs and verifies tokens.
pub struct Tokens {
    key: KeyPair,
    key_id: String,
    issuer: String,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens")
            .field("key_id", &self.key_id)
            .finish_non_exhaustive()
    }
}

impl Tokens {
    /// Loads the key below `data_dir`, or makes it. `issuer` names this cluster in tokens.
    ///
    /// # Errors
    /// `File` and `Content` name the key file.
    pub fn open(data_dir: &Path, issuer: &str) -> Result<Self, PkiError> {
        let path = data_dir.join("pki").join(KEY_FILE);
        let key = match std::fs::read_to_string(&path) {
            Ok(pem) => {
                KeyPair::from_pem_and_sign_algo(&pem, &PKCS_ECDSA_P256_SHA256).map_err(|e| {
                    PkiError::Content {
                        path,
                        why: e.to_string(),
                    }
                })?
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let made = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256);
                let issue = |source| PkiError::Issue {
                    name: "service account tokens".into(),
                    source,
                };
                let key = made.map_err(issue)?;
                pki::write_private(&path, key.serialize_pem().as_bytes())?;
                key
            }
            Err(source) => {
                return Err(PkiError::File {
                    what: "read",
                    path,
                    source,
                });
            }
        };
        let key_id = URL_SAFE_NO_PAD.encode(Sha256::digest(key.subject_public_key_info()));
        Ok(Self {
            key,
            key_id,
            issuer: issuer.into(),
        })
    }

    #[must_use]
    pub fn issuer(&self) -> &str {
        &self.issuer
    }

    /// Signs claims. `None` when the key cannot sign.
    #[must_use]
    pub fn sign(&self, claims: &Value) -> Option<String> {
        let header = json!({"alg": "ES256", "kid": self.key_id, "typ": "JWT"});
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", encode(&header), encode(claims));
        let signature = raw_signature(&self.key.sign(signed.as_bytes()).ok()?)?;
        Some(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    /// The claims of a token that this key signed, whose time has come and not passed.
    #[must_use]
    pub fn verify(&self, token: &str, now_s: i64) -> Option<Value> {
        if token.len() > TOKEN_BYTES {
            return None;
        }
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, claims) = signed.split_once('.')?;
        let decode =
            |text: &str| serde_json::from_slice::<Value>(&URL_SAFE_NO_PAD.decode(text).ok()?).ok();
        let header = decode(header)?;
        if header["alg"] != "ES256" || header["kid"] != self.key_id.as_str() {
            return None;
        }
        let signature = der_signature(&URL_SAFE_NO_PAD.decode(signature).ok()?)?;
        let provider = rustls::crypto::ring::default_provider();
        let known = provider.signature_verification_algorithms.mapping;
        let (_, algorithms) = known
            .iter()
            .find(|(s, _)| *s == SignatureScheme::ECDSA_NISTP256_SHA256)?;
        let public = self.key.public_key_raw();
        let valid = algorithms.iter().any(|a| {
            a.verify_signature(public, signed.as_bytes(), &signature)
                .is_ok()
        });
        if !valid {
            return None;
        }
        let claims = decode(claims)?;
        let in_time = claims["exp"].as_i64()? > now_s && claims["nbf"].as_i64()? <= now_s;
        (in_time && claims["iss"] == self.issuer.as_str()).then_some(claims)
    }
}

/// A DER sequence of two integers as two coordinates of fixed length.
fn raw_signature(der: &[u8]) -> Option<[u8; 2 * COORDINATE]> {
    let [0x30, length, rest @ ..] = der else {
        return None;
    };
    if usize::from(*length) != rest.len() {
        return None;
    }
    let (r, rest) = integer(rest)?;
    let (s, rest) = integer(rest)?;
    if !rest.is_empty() {
        return None;
    }
    let mut raw = [0; 2 * COORDINATE];
    raw[COORDINATE - r.len()..COORDINATE].copy_from_slice(r);
    raw[2 * COORDINATE - s.len()..].copy_from_slice(s);
    Some(raw)
}

/// A DER integer without leading zeros, and what follows it.
fn integer(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let [0x02, length, rest @ ..] = der else {
        return None;
    };
    let (mut value, rest) = rest.split_at_checked(usize::from(*length))?;
    while let [0, tail @ ..] = value {
        value = tail;
    }
    (value.len() <= COORDINATE).then_some((value, rest))
}

/// Two coordinates as a DER sequence.
fn der_signature(raw: &[u8]) -> Option<Vec<u8>> {
    if raw.len() != 2 * COORDINATE {
        return None;
    }
    let mut body = Vec::with_capacity(2 * COORDINATE + 8);
    for coordinate in raw.chunks(COORDINATE) {
        let first = coordinate
            .iter()
            .position(|b| *b != 0)
            .unwrap_or(COORDINATE - 1);
        let value = &coordinate[first..];
        let pad = value[0] >= 0x80;
        body.extend([0x02, u8::try_from(value.len() + usize::from(pad)).ok()?]);
        if pad {
            body.push(0);
        }
        body.extend_from_slice(value);
    }
    let mut der = vec![0x30, u8::try_from(body.len()).ok()?];
    der.extend(body);
    Some(der)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(exp: i64) -> Value {
        json!({"iss": "https://issuer", "nbf": 10, "exp": exp, "sub": "me"})
    }

    #[test]
    fn a_token_is_good_from_its_begin_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("pki")).unwrap();
        let tokens = Tokens::open(dir.path(), "https://issuer").unwrap();
        let token = tokens.sign(&claims(100)).unwrap();
        assert_eq!(tokens.verify(&token, 50).unwrap()["sub"], "me");
        assert!(tokens.verify(&token, 100).is_none(), "expired");
        assert!(tokens.verify(&token, 9).is_none(), "not yet");
        let again = Tokens::open(dir.path(), "https://issuer").unwrap();
        assert!(again.verify(&token, 50).is_some(), "the key is kept");
        let elsewhere = Tokens::open(dir.path(), "https://other").unwrap();
        assert!(elsewhere.verify(&token, 50).is_none(), "another issuer");
    }

    #[test]
    fn altered_and_foreign_tokens_are_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        for d in [&dir, &other] {
            std::fs::create_dir(d.path().join("pki")).unwrap();
        }
        let tokens = Tokens::open(dir.path(), "https://issuer").unwrap();
        let foreign = Tokens::open(other.path(), "https://issuer").unwrap();
        assert!(
            tokens
                .verify(&foreign.sign(&claims(100)).unwrap(), 50)
                .is_none()
        );
        let token = tokens.sign(&claims(100)).unwrap();
        let parts: Vec<&str> = token.split('.').collect();
        let longer = URL_SAFE_NO_PAD.encode(claims(10_000).to_string());
        let none = URL_SAFE_NO_PAD.encode(json!({"alg": "none", "kid": tokens.key_id}).to_string());
        for bad in [
            format!("{}.{longer}.{}", parts[0], parts[2]),
            format!("{none}.{}.", parts[1]),
            format!("{}.{}.{}", parts[0], parts[1], &parts[2][..10]),
            "nonsense".into(),
            "..".into(),
            String::new(),
        ] {
            assert!(tokens.verify(&bad, 50).is_none(), "{bad}");
        }
    }

    #[test]
    fn signatures_of_every_length_convert_both_ways() {
        for (r, s) in [(1_u8, 0x80_u8), (0xff, 0x7f), (0, 1)] {
            let mut raw = [0_u8; 2 * COORDINATE];
            raw[COORDINATE - 1] = r;
            raw[COORDINATE] = s;
            let der = der_signature(&raw).unwrap();
            assert_eq!(raw_signature(&der), Some(raw));
        }
    }
}
