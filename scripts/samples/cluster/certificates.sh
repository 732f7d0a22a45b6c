#!/bin/sh
# Makes MindSpore's config.json and the files that it names, by openssl, in a new folder: an authority,
# a certificate for the scheduler, one for the workers, and the password of both.
set -eu
umask 077
mkdir "$1"
cd "$1"

new="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
openssl rand -hex 16 >password
openssl req -x509 $new -keyout ca.key -out ca.crt -days 365 -subj "/CN=authority of this job" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" 2>/dev/null
for name in server client; do
    openssl req $new -keyout $name.key -out $name.csr -subj "/CN=$name" 2>/dev/null
    openssl x509 -req -in $name.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -out $name.crt 2>/dev/null
    openssl pkcs12 -export -in $name.crt -inkey $name.key -passout file:password -out $name.p12
    rm $name.key $name.csr $name.crt
done
rm ca.key # nobody else gets a certificate

cat >config.json <<'END'
{"server_cert_path": "server.p12", "client_cert_path": "client.p12", "ca_cert_path": "ca.crt",
 "crl_path": "", "cipher_list": "", "cert_expire_warning_time_in_day": 90}
END
